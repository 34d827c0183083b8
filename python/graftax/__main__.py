# SPDX-License-Identifier: Apache-2.0
"""The command line: `python -m graftax run | replay | minimize | demo | bench | doctor | explain`."""

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

MODELS = ("equinox", "nnx", "plain")


def _parser() -> argparse.ArgumentParser:
    about = "Scripts under graftax, the demo, benchmarks and diagnosis."
    parser = argparse.ArgumentParser(prog="python -m graftax", description=about)
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="train three models through graftax.jit and compare it with others")
    demo.add_argument("--quick", action="store_true", help="few epochs, few timed steps")
    demo.add_argument("--trace", action="store_true", help="show the flatten and unflatten calls of one call instead")
    demo.add_argument("--model", action="append", choices=MODELS, default=[], help="only this one; may be repeated")

    commands.add_parser(
        "bench",
        help="run benchmarks/run.py of a checkout: --budgets, --growth, --plot FILE and other options of its own",
        add_help=False,
    )
    commands.add_parser("doctor", help="print versions, devices, settings and findings, and run a self-test")

    explain = commands.add_parser("explain", help="make a page of what graftax.log_recompiles wrote of a run")
    explain.add_argument(
        "log", nargs="+", type=Path, help="files of GRAFTAX_EXPLAIN=trace.jsonl, of one or more processes"
    )
    explain.add_argument("--out", type=Path, help="the page; by default beside the first log, as .html")

    run = commands.add_parser("run", help="run a script with graftax's jit in place of jax.jit, filter_jit and nnx.jit")
    run.add_argument("--watch", action="store_true", help="replace nothing, and say what graftax would change")
    run.add_argument("--report", type=Path, metavar="PAGE.html", help="write it as a page; implies --watch")
    run.add_argument("script", help="the script; what follows are its own arguments")
    run.add_argument("arguments", nargs=argparse.REMAINDER)

    replay = commands.add_parser("replay", help="run calls of graftax.record again, and compare the results")
    replay.add_argument("file", type=Path)
    replay.add_argument("--plain", action="store_true", help="run the plain function, without jit")
    replay.add_argument("--where", action="store_true", help="name the operation that made the first nan or infinity")

    smaller = commands.add_parser("minimize", help="write the smallest part of a recorded call that fails as a script")
    smaller.add_argument("file", type=Path)
    for fails, text in (
        ("wrong", "look for a result that differs from that of the same operations one by one"),
        ("crash", "look for what ends the process or raises, in other processes"),
        ("hang", "look for what takes longer than the time limit, in other processes"),
    ):
        smaller.add_argument(f"--{fails}", dest="fails", action="store_const", const=fails, help=text)
    smaller.add_argument(
        "--tolerance",
        type=float,
        help="with --wrong, how far a result may be off, relative to its largest element; by default by its type",
    )
    smaller.add_argument("--timeout", type=float, default=60, help="seconds for each part, with --crash and --hang")
    smaller.add_argument("--out", type=Path, help="the script; by default beside the file, as .py")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    parser = _parser()
    # What follows a script's name, or the command of the benchmarks, is for them.
    options, further = parser.parse_known_args(argv)
    # Each command imports what it needs: the libraries of the demo need not be installed for the others.
    if options.command == "run":
        from graftax._cli.run import run as run_script

        return run_script(options.script, [*options.arguments, *further], options.watch, options.report)
    if options.command == "bench":
        return bench(further)
    if further:
        parser.error(f"unrecognized arguments: {' '.join(further)}")
    if options.command == "doctor":
        from graftax._cli.doctor import doctor

        return doctor()
    if options.command == "replay":
        from graftax._cli.replay import replay as replay_file

        return replay_file(options.file, options.plain, options.where)
    if options.command == "minimize":
        from graftax._cli.replay import minimize

        return minimize(options.file, options.out, options.fails or "nonfinite", options.tolerance, options.timeout)
    if options.command == "explain":
        return explain_logs(options.log, options.out)
    from graftax._cli.demo import main as run_demo

    return run_demo(trace=options.trace, quick=options.quick, models=options.model)


def explain_logs(logs: list[Path], out: Path | None) -> int:
    """Make one page of some logs."""
    from graftax._explain import html_page

    try:
        text = html_page.page(html_page.read(logs))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    out = out or logs[0].with_suffix(".html")
    out.write_text(text, encoding="utf-8")
    print(out)
    return 0


def bench(argv: list[str]) -> int:
    """Run `benchmarks/run.py`, which is part of a checkout and not of the installed package."""
    file = Path(__file__).resolve()
    for root in (Path.cwd(), *Path.cwd().parents, *file.parents):
        if (root / "benchmarks" / "run.py").is_file() and (root / "python" / "graftax").is_dir():
            break
    else:
        print(
            "The benchmarks are not part of the installed package: run this in a checkout of graftax,"
            " where benchmarks/run.py lies.",
            file=sys.stderr,
        )
        return 2
    # The benchmarks are no part of what is installed, and import each other by the name of their folder.
    sys.path.insert(0, str(root))
    run: Callable[[list[str]], int] = importlib.import_module("benchmarks.run").main
    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
