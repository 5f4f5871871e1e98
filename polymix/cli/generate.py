"""polymix generate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polymix.cli.shared import Threads, check_paths, exclude, thread_count


def command(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="Folder of a language model and its tokenizer, or of polymix train generation."
        ),
    ],
    prompt: Annotated[str | None, typer.Option(help="How the text begins. Default: standard input.")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of standard input is a prompt.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print word by word.")] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Most new tokens. Default: 100, or what the model's positions leave.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the most likely token each time. Default: 0.8, or 0 with --beams.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Draw among this many of the most likely tokens. Default: all.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw among the most likely tokens that have this probability together.")
    ] = None,
    beams: Annotated[int, typer.Option(help="Texts followed at once; the most likely one is kept.")] = 1,
    num: Annotated[int, typer.Option(help="Texts for each prompt, or images.")] = 1,
    class_: Annotated[
        list[str] | None, typer.Option("--class", help="Images: class, by number or name. Repeatable.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Images: steps of the sampler. Default: as in training.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Images: ω of guidance. Default: as in training.")] = None,
    sampler: Annotated[
        str | None,
        typer.Option(
            help="Images: euler, heun, dopri5, euler_maruyama, or for diffusion ddpm, ddim, dpm++. Default: as trained."
        ),
    ] = None,
    vae: Annotated[str | None, typer.Option(help="Images: folder of the autoencoder of a model of latents.")] = None,
    out: Annotated[Path | None, typer.Option(help="Images: the picture's file. Default: samples.png.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random draws.")] = 0,
    sequence_parallel: Annotated[
        int, typer.Option(help="Texts: processes that read a prompt together: all that torchrun has started.")
    ] = 1,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: as saved.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda …")] = "cpu",
    threads: Threads = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run code that the folder names.")] = False,
) -> None:
    """Continue a text with a language model, or draw images with a model of polymix train generation.

    Text goes to standard output, everything else to standard error. Several texts are separated by a line of ---.
    Nothing is downloaded.

    Examples: polymix generate polymix-train --prompt "Once upon a time" --stream

    polymix generate digits-by-class --class 3 --num 16 --steps 50 --guidance 4 --out samples.png
    """
    check_paths("folder", folder)
    check_paths("--vae", vae)

    of_images = {"--class": class_, "--steps": steps, "--guidance": guidance, "--sampler": sampler, "--vae": vae,
                 "--out": out}  # fmt: skip
    if (folder / "generator.json").is_file():
        from polymix.workflows.draw import SHEET, Settings, draw

        exclude(folder, "draws images", {
            "--prompt": prompt, "--lines": lines, "--stream": stream, "--max-new-tokens": max_new_tokens,
            "--temperature": temperature, "--top-k": top_k, "--top-p": top_p, "--beams": None if beams == 1 else beams,
            "--dtype": dtype, "--trust": trust,
            "--sequence-parallel": None if sequence_parallel == 1 else sequence_parallel,
        })  # fmt: skip
        drawn = Settings(tuple(class_ or ()), num, steps, guidance, sampler, seed, vae, out or SHEET)
        typer.echo(draw(folder, drawn, device=device, threads=thread_count(threads)))
        return
    exclude(folder, "continues texts", of_images)
    from polymix.workflows import generate

    settings = generate.Settings(max_new_tokens, temperature, top_k, top_p, beams, num, seed, stream)
    raise typer.Exit(
        generate.command(
            folder,
            prompt,
            settings,
            lines=lines,
            sequence_parallel=sequence_parallel,
            device=device,
            dtype=dtype,
            trust=trust,
            threads=thread_count(threads),
        )
    )
