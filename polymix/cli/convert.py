"""The command `polymix convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polymix.cli.shared import DATA_NAMES, Resume, Threads, bars, check_paths, check_report, thread_count, words
from polymix.errors import OptionError


def command(
    model: Annotated[str, typer.Option(help="timm/NAME, torchvision/NAME, a saved folder, or file.py:function.")],
    plan: Annotated[
        str | None,
        typer.Option(help="A mixer such as padre:degree=3 (default: padre); 1:1; LAYER=MIXER,…; or recommend."),
    ] = None,
    mixer: Annotated[
        str | None, typer.Option(help="Mixer of a pattern such as 1:1 (default: padre), or of all layers.")
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="State dict of the model: a .safetensors file, or one written by torch.save.")
    ] = None,
    classes: Annotated[
        int | None, typer.Option(help="Number of classes; with another than the weights have, the head is new.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder of images by class or of idx files; fashion-mnist; digits; text; noise, for generators; for "
            "language models self, which lets them draw their own texts, or random (tokens)."
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Texts of --data self or random (default: 4,096).")] = None,
    image_size: Annotated[
        int | None,
        typer.Option(help="Side of the images in pixels (default: the model's own). Learned positions are resized."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(help="Sequence length for text models (default: --context, or at most 512)."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens that a text model takes from now on, more than its maximum.")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            help="Inputs per call (default: 32 images or 4 windows of text of --data, 16 drawn texts, else 1)."
        ),
    ] = None,
    distill_epochs: Annotated[int, typer.Option(help="Epochs of fine-tuning on labels and the original model.")] = 0,
    imitate_epochs: Annotated[
        int | None,
        typer.Option(
            help="Epochs before that, in which each mixer imitates its attention (default: 1 with --distill-epochs)."
        ),
    ] = None,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            help="The mixers' highest in fine-tuning (default: 5e-4); a tenth of it for what was trained before."
        ),
    ] = None,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Train a model with untrained weights, on the labels alone.")
    ] = False,
    precision: Annotated[
        str, typer.Option(help="Of the training: float32, or bf16-mixed or 16-mixed (mixed precision).")
    ] = "float32",
    lora: Annotated[
        int | None, typer.Option(help="Train only a term of this rank for each matrix of the mixers, and merge it.")
    ] = None,
    progressive: Annotated[
        int | None,
        typer.Option(help="Fine-tune with one more mixer every so many steps, the last layer's first (default: all)."),
    ] = None,
    distill_loss: Annotated[
        str,
        typer.Option(help="What fine-tuning aligns: the logits and labels, or the last features, without labels."),
    ] = "logits",
    init: Annotated[str, typer.Option(help="inherit the attention's weights, or fresh.")] = "inherit",
    windows: Annotated[str, typer.Option(help="keep the windows of windowed attention, or merge them.")] = "keep",
    positions: Annotated[
        str | None,
        typer.Option(
            help="With --context: interpolate, repeat or none (learned positions), interpolate or continue (rotary "
            "angles). Where the model adds positions to queries and keys only (DETR): all, drop or values (as the "
            "model)."
        ),
    ] = None,
    match: Annotated[
        str | None, typer.Option(help="parameters: give each mixer as many as its attention, by its expand option.")
    ] = None,
    multi_scale: Annotated[
        bool,
        typer.Option(
            "--multi-scale/--no-multi-scale", help="Keep EfficientViT's multi-scale branches where the mixer can (qt)."
        ),
    ] = True,
    drop: Annotated[
        str,
        typer.Option(
            help="Parts of attention that may be lost, separated by commas: position_bias, soft_cap, talking_heads, "
            "sinks, rotary, qk_norm, gate."
        ),
    ] = "",
    keep_host: Annotated[
        bool,
        typer.Option(
            "--keep-host", help="Save GPT-2 and Llama in their own classes, not as polymix's language models."
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="Device, such as cpu or cuda.")] = "cpu",
    threads: Threads = None,
    seconds: Annotated[
        float, typer.Option(help="Time for measuring the model, and as much again for other lengths.")
    ] = 20.0,
    lengths: Annotated[
        str, typer.Option(help="Sequence lengths to time, as multiples of the layers' own.")
    ] = "0.25,1,4,16",
    seed: Annotated[int, typer.Option(help="Seed of fresh weights and of the order of the data.")] = 0,
    trust: Annotated[bool, typer.Option("--trust", help="Allow the user code that a saved folder names.")] = False,
    license: Annotated[
        str | None, typer.Option(help="Licence for the model card, such as apache-2.0 (default: the model's own).")
    ] = None,
    base_model: Annotated[
        str | None, typer.Option(help="Repository of the original model, for the model card (default: if known).")
    ] = None,
    push_to_hub: Annotated[
        str | None, typer.Option(help="Upload the result to this repository of the Hugging Face Hub: USER/NAME.")
    ] = None,
    resume: Resume = False,
    out: Annotated[Path, typer.Option(help="New folder for the model, its report and its model card.")] = Path(
        "polymix-convert"
    ),
) -> None:
    """Replace attention in a model by mixers, recover the accuracy by distillation, and measure the result.

    A plan by layers is "blocks.*.attn=padre:degree=3,blocks.11.attn=keep"; other layers are kept.
    Nothing is downloaded: a model by name has untrained weights, unless you pass --weights.

    GPT-2 and Llama become language models that transformers' Auto classes can load.

    Example: polymix convert --model timm/deit_tiny_patch16_224 --plan padre --out deit-padre
    """
    check_report()
    check_paths("--weights", weights)
    check_paths("--data", data, names=(*DATA_NAMES, "noise", "self", "random"))
    import torch

    from polymix.workflows.convert.run import run
    from polymix.workflows.convert.settings import Settings

    if plan is None:  # a mixer alone is for all layers
        plan, mixer = mixer or "padre", None
    settings = Settings(
        model=model, plan=plan, mixer=mixer, weights=None if weights is None else str(weights), classes=classes,
        data=data, samples=samples, image_size=image_size, tokens=tokens, context=context, batch=batch,
        distill_epochs=distill_epochs, imitate_epochs=imitate_epochs, learning_rate=learning_rate,
        from_scratch=from_scratch, precision=precision, lora=lora, progressive=progressive,
        distill_loss=distill_loss, init=init,
        windows=windows, positions=positions, match=match, multi_scale=multi_scale, drop=drop,
        keep_host=keep_host, device=device,
        seed=seed, seconds=seconds, lengths=_factors(lengths), trust=trust, license=license, base_model=base_model,
        push_to_hub=push_to_hub,
    )  # fmt: skip
    torch.set_num_threads(thread_count(threads))
    console = Console()
    with bars(console, out) as shown:
        progress = shown if console.is_terminal else None
        paragraphs = run(settings, out, resume=resume, say=print, progress=progress)
    print("\n" + "\n\n".join(paragraphs))


def _factors(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in words(text))
    except ValueError as error:
        raise OptionError("--lengths", repr(text), "numbers separated by commas", "Try 0.25,1,4.") from error
