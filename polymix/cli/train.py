"""polymix train: every option of a domain is a flag, made from its recipe."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from polymix.cli.shared import Command, bars, check_paths, check_report, thread_count

# What the command itself takes; the rest are the recipe's.
OWN_OPTIONS = ("set_", "preset", "config", "out", "check", "threads", "resume")


def command(
    context: typer.Context,
    domain: Annotated[
        str | None,
        typer.Argument(
            metavar="DOMAIN|FILE",
            help="A domain such as text, or a file: TOML, YAML or JSON with task, or Python that sets `recipe`.",
        ),
    ] = None,
    show_help: Annotated[bool, typer.Option("--help", "-h", help="The options of a domain, or this page.")] = False,
) -> None:
    """Train a model on a domain's default data or on yours: text, pictures, scans, or a domain of your own.

    polymix train DOMAIN --help lists every option of that domain. The folder gets the model, results.json, report.html
    with its pictures, metrics.jsonl and a checkpoint. On default data linear_floor, which mixes nothing, is trained
    too, unless the host keeps its own attention; --control False leaves that out.

    Several processes: torchrun --nproc-per-node 2 -m polymix train …

    Example: polymix train satellite --mixer pom --out satellite-pom
    """
    if domain is None:
        from polymix.train.registry import domains

        print(context.get_help())
        print(f"\nDomains: {', '.join(domains())}.")
        return
    words = [*context.args, *(["--help"] if show_help else [])]
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})(_domain_command(domain))
    status = app(words, standalone_mode=False, prog_name=f"polymix train {domain}")
    if status:
        raise typer.Exit(status)


def _domain_command(domain: str) -> Callable[..., int]:
    """A function with a parameter for every option of a domain, for Typer, which takes the flags from its signature."""
    from polymix.train.recipe import table
    from polymix.train.registry import domains as known_domains
    from polymix.train.registry import named_recipe, recipe_class

    recipe = recipe_class(domain) if domain in known_domains() else type(named_recipe(domain))
    parameters = [
        _option(name, str | None, None, f"--{name.replace('_', '-')}", metavar="VALUE",
                help=f"{meaning} [{kind}; default: {default}]")
        for name, kind, default, meaning in table(recipe)
    ]  # fmt: skip
    presets = f": {', '.join(recipe.presets)}" if recipe.presets else " (this domain has none)"
    parameters += [
        _option("set_", list[str] | None, None, "--set", metavar="OPTION=VALUE", help="As --option value. Repeatable."),
        _option("preset", str | None, None, help=f"Sizes and schedule by name{presets}."),
        _option("config", Path | None, None, help="A TOML, YAML or JSON file with options."),
        _option("out", Path, Path("polymix-train"), help="Folder for the model, the measurements and the report."),
        _option("check", bool, False, "--check", help="List all problems of --data; train nothing."),
        _option("threads", int | None, None, help="Threads of PyTorch (default: OMP_NUM_THREADS, or one per core)."),
        _option("resume", bool, False, "--resume", help="Continue the run in --out."),
    ]
    flags = {parameter.name for parameter in parameters} - set(OWN_OPTIONS)

    def function(**options: Any) -> int:
        own = {name: options[name] for name in OWN_OPTIONS}
        return _run(domain, {name: options[name] for name in flags}, **own)

    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    function.__doc__ = f"{inspect.getdoc(recipe)}\n\nAll options may also stand in a file: --config options.toml"
    return function


def _option(name: str, kind: Any, default: Any, *words: Any, **more: Any) -> inspect.Parameter:
    value = typer.Option(default, *words, **more)
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value, annotation=kind)


def _run(
    domain: str, flags: Mapping[str, Any], *, set_: list[str] | None, preset: str | None, config: Path | None,
    out: Path, check: bool, threads: int | None, resume: bool,
) -> int:  # fmt: skip
    """Train, or check the data. Returns the exit status."""
    from functools import partial

    from polymix.numbers import plural
    from polymix.train.registry import chosen_recipe, options_of

    recipe = chosen_recipe(domain, preset=preset, config=config, options=options_of(set_ or (), flags))
    check_paths("data", *(getattr(recipe, name) for name in recipe.sources), names=recipe.names)
    check_paths("init", recipe.init)
    if not check:
        check_report()
    from polymix.train.run import check_data, train  # these need PyTorch, and what is wrong with options does not

    console = Console()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    if check:
        problems = check_data(recipe, say)
        for problem in problems:
            say(problem)
        say(f"{plural(len(problems), 'problem')} in {recipe.source}")
        return int(bool(problems))
    import torch

    torch.set_num_threads(thread_count(threads))
    with bars(console, out, saved="checkpoint/last.ckpt"):
        train(recipe, out, resume=resume, say=say)
    return 0
