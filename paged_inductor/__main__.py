"""`python -m paged_inductor doctor | ab | top | tune`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ._tune import add_options as add_tune_options
from ._tune import tune as run_tuning

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m paged_inductor", description="Virtual memory for KV caches.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    commands.add_parser("doctor", help="what is installed, and whether a small paged loop compiles and is right")
    ab = commands.add_parser(
        "ab",
        help="the same generation dense and paged, side by side (needs the extra 'hf')",
        epilog='example: python -m paged_inductor ab --model ./SmolLM2-135M-Instruct --beams 4 --prompt "Why is the '
        'sky blue? Answer in three sentences."',
    )
    ab.add_argument("--model", required=True, help="folder of a transformers model, or its name on the Hub")
    ab.add_argument("--gguf", help="name of the GGUF file in that folder, if the weights are in one")
    ab.add_argument("--prompt", required=True, action="append", help="may be given several times, for a batch")
    ab.add_argument("--tokens", type=int, default=32, help="new tokens to generate (default: %(default)s)")
    ab.add_argument("--beams", type=int, default=1, help="beams to search with (default: %(default)s)")
    ab.add_argument(
        "--dtype",
        default="float32",
        choices=("float32", "bfloat16", "float16"),
        help="of the weights (default: %(default)s)",
    )
    ab.add_argument(
        "--inner",
        default="eager",
        choices=("inductor", "aot_eager", "eager"),
        help="what compiles the paged model; the dense one is not compiled (default: %(default)s, which starts soonest "
        "and leaves the model itself uncompiled, too; page() has inductor)",
    )
    watch = commands.add_parser("top", help="the books of a running process, live (needs the extra 'top')")
    watch.add_argument("--url", help="where it serves its metrics (default: this machine, port 9464)")
    watch.add_argument("--interval", type=float, default=1.0, help="seconds between frames (default: %(default)s)")
    watch.add_argument("--once", action="store_true", help="print one frame and end")
    tune = commands.add_parser("tune", help="time the kernels' configurations on this GPU and keep the fastest on disk")
    add_tune_options(tune)
    options = parser.parse_args(arguments)
    if options.command == "doctor":
        from ._doctor import doctor

        return doctor()
    if options.command == "top":
        from ._top import top

        return top(options)
    if options.command == "tune":
        return run_tuning(options)
    from ._ab import ab as compare

    return compare(options)


if __name__ == "__main__":
    sys.exit(main())
