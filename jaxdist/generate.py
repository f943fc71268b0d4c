"""`python -m jaxdist.generate --workdir W --prompt TEXT`: text from a run's newest
checkpoint.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax

from jaxdist.config import ConfigError
from jaxdist.evaluation import loading, trained_run
from jaxdist.inference.decoding import SamplingConfig
from jaxdist.trainer import cli, exit_code


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    flags = _parser().parse_args(arguments)
    prompts = _prompts(flags)
    run = loading.load_run(**cli.run_options(flags), modules=False)
    sampling = SamplingConfig(flags.temperature, flags.top_k, flags.top_p)
    options = {"max_tokens": flags.max_tokens, "sampling": sampling, "seed": flags.seed}
    before = [_turn("system", flags.system)] if flags.system else []
    if flags.interactive:
        return _interact(run, before if flags.chat else None, options)
    options["num_samples"] = flags.num_samples
    if flags.chat:
        chats = [[*before, _turn("user", text)] for text in prompts]
        samples = run.chat(chats, **options)
    else:
        samples = run.generate(prompts, **options)
    texts = [sample.text for of_prompt in samples for sample in of_prompt]
    if jax.process_index() == 0:
        for number, text in enumerate(texts, 1):
            if len(texts) > 1:
                print(f"--- {number} of {len(texts)}")
            print(text)
    return 0


def _turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _prompts(flags: argparse.Namespace) -> list[str]:
    """Collects the prompts.

    Raises:
      ConfigError: there is none, a file cannot be read, or flags do not go together.
    """
    prompts = list(flags.prompt)
    faults = []
    for file in flags.prompt_file:
        try:
            prompts.append(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            faults.append(f"--prompt-file {file}: {reason}; give a UTF-8 text")
    has_prompts = bool(prompts or faults)
    if has_prompts and flags.interactive:
        faults.append(
            "--interactive reads its prompts: "
            "leave out --prompt TEXT or --prompt-file FILE"
        )
    if not has_prompts and not flags.interactive:
        faults.append("give --prompt TEXT or --prompt-file FILE")
    if flags.system and not flags.chat:
        faults.append("--system: a turn of a chat; give --chat, too")
    if flags.interactive and flags.num_samples > 1:
        faults.append(
            "--interactive writes one text for a prompt: "
            f"leave out --num-samples={flags.num_samples}"
        )
    if faults:
        raise ConfigError(faults)
    return prompts


def _interact(
    run: trained_run.TrainedRun,
    chat: list[dict[str, str]] | None,
    options: dict[str, Any],
) -> int:
    """Answers each line of standard input, as the text comes; Ctrl-C ends an answer,
    Ctrl-D all.

    Args:
      chat: the turns so far, which then go on; None: each line is a text to go on from.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            "--interactive: required one process; start it without launch"
        )
    mark = "> " if sys.stdin.isatty() else ""
    if mark:
        print("a prompt a line; Ctrl-C ends an answer, Ctrl-D ends", file=sys.stderr)
    while True:
        try:
            prompt = input(mark)
        except (EOFError, KeyboardInterrupt):
            return 0
        answer = ""
        question: str | list[dict[str, str]] = prompt
        if chat is not None:
            question = [*chat, _turn("user", prompt)]
        try:
            for text in run.stream(question, **options):
                print(text, end="", flush=True)
                answer += text
            if chat is not None:
                chat += [_turn("user", prompt), _turn("assistant", answer)]
        except KeyboardInterrupt:
            pass
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
        print(flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = cli.WorkdirParser("generate", __doc__)
    add = parser.add_argument
    sampling = SamplingConfig()
    add(
        "--prompt",
        action="append",
        default=[],
        help="how the text begins; may be repeated",
    )
    add(
        "--prompt-file",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="a file that has it",
    )
    add(
        "--interactive",
        action="store_true",
        help="read prompts, a line each, and write as text is drawn",
    )
    add(
        "--chat",
        action="store_true",
        help="prompts are a user's turns; print the assistant's (extra chat)",
    )
    add(
        "--system",
        metavar="TEXT",
        help="with --chat: the system's turn, before the user's",
    )
    add("--max-tokens", type=int, default=128, help="new tokens at most (default: 128)")
    add(
        "--temperature",
        type=float,
        default=sampling.temperature,
        help="0 = the likeliest (default: 1)",
    )
    add(
        "--top-k",
        type=int,
        default=sampling.top_k,
        help="only the k likeliest; 0 = all (default)",
    )
    add(
        "--top-p",
        type=float,
        default=sampling.top_p,
        help="the likeliest that sum to it (default: 1 = all)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="the same seed gives the same text (default: 0)",
    )
    add("--num-samples", type=int, default=1, help="texts for each prompt (default: 1)")
    return parser


if __name__ == "__main__":
    raise SystemExit(exit_code.exit_code(main))
