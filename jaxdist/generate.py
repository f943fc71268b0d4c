"""Text that a run's model generates from prompts.

The newest checkpoint is used unless `--step` names another one. Example: `jaxdist
generate --workdir runs/quickstart --prompt "def main"`.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import jax

from jaxdist.config import ConfigError
from jaxdist.distributed import stop_signals
from jaxdist.evaluation import loading, trained_run
from jaxdist.inference.decoding import SamplingConfig
from jaxdist.storage.untrusted import visible
from jaxdist.trainer import exit_code, workdir_parser


def main(arguments: list[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    flags = _parser().parse_args(arguments)
    prompts = _prompts(flags)
    run = loading.load_run(**workdir_parser.run_options(flags), modules=False)
    sampling = SamplingConfig(
        temperature=flags.temperature, top_k=flags.top_k, top_p=flags.top_p
    )
    options = {"max_tokens": flags.max_tokens, "sampling": sampling, "seed": flags.seed}
    system_turns = []
    if flags.system:
        system_turns = [_turn("system", flags.system)]
    if flags.chat:
        exit_code.print_error(run.chat_warning)
    if flags.interactive:
        return _interact(run, system_turns if flags.chat else None, options)
    options["num_samples"] = flags.num_samples
    with stop_signals.ended_by_interrupts():
        if flags.chat:
            chats = [[*system_turns, _turn("user", text)] for text in prompts]
            samples = run.chat(chats, **options)
        else:
            samples = run.generate(prompts, **options)
    texts = [sample.text for prompt_samples in samples for sample in prompt_samples]
    if jax.process_index() == 0:
        for number, text in enumerate(texts, 1):
            if len(texts) > 1:
                print(f"--- {number} of {len(texts)}")
            print(_shown(text))
    return 0


def _shown(text: str) -> str:
    """Replaces control characters, which a terminal would obey; others get them all."""
    return visible(text) if sys.stdout.isatty() else text


def _turn(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def _prompts(flags: argparse.Namespace) -> list[str]:
    """Collects the prompts of --prompt and --prompt-file.

    Raises:
      ConfigError: there is no prompt, a file cannot be read, or flags exclude each
        other.
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
            "--interactive writes one text per prompt: "
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
    """Answers each line of standard input, and prints text as it is drawn.

    Ctrl-C ends an answer, Ctrl-D ends the command.

    Args:
      run: the loaded model.
      chat: turns that come before the user's first; answers are appended to it. None:
        each line is the beginning of a text.
      options: arguments of `run.stream`.

    Returns:
      The exit code, 0.
    """
    if jax.process_count() > 1:
        raise ConfigError(
            "--interactive: required one process; start it without launch"
        )
    input_mark = ""
    if sys.stdin.isatty():
        input_mark = "> "
        print(
            "Type one prompt per line. Ctrl-C ends an answer, Ctrl-D ends the command.",
            file=sys.stderr,
        )
    while True:
        try:
            prompt = input(input_mark)
        except (EOFError, KeyboardInterrupt):
            return 0
        answer = ""
        question: str | list[dict[str, str]] = prompt
        if chat is not None:
            question = [*chat, _turn("user", prompt)]
        try:
            for text in run.stream(question, **options):
                print(_shown(text), end="", flush=True)
                answer += text
            if chat is not None:
                chat += [_turn("user", prompt), _turn("assistant", answer)]
        except KeyboardInterrupt:
            pass
        except ConfigError as error:
            print(f"error: {error}", file=sys.stderr)
        print(flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = workdir_parser.WorkdirParser("generate", __doc__)
    add = parser.add_argument
    sampling = SamplingConfig()
    add(
        "--prompt",
        action="append",
        default=[],
        metavar="TEXT",
        help="beginning of the text; repeat the flag for several texts",
    )
    add(
        "--prompt-file",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="UTF-8 file with the beginning of a text; may be repeated",
    )
    add(
        "--interactive",
        action="store_true",
        help="read one prompt per line of standard input, and print text as it is drawn",
    )
    add(
        "--chat",
        action="store_true",
        help="treat prompts as a user's turns, and print the assistant's (extra chat)",
    )
    add(
        "--system",
        metavar="TEXT",
        help="with --chat: the system's turn, before the user's (default: none)",
    )
    add(
        "--max-tokens",
        type=int,
        default=128,
        metavar="N",
        help="largest number of new tokens (default: 128)",
    )
    add(
        "--temperature",
        type=float,
        default=sampling.temperature,
        metavar="T",
        help="divides the logits; 0 = always the likeliest token (default: 1)",
    )
    add(
        "--top-k",
        type=int,
        default=sampling.top_k,
        metavar="K",
        help="draw from the K likeliest tokens; 0 = from all (default: 0)",
    )
    add(
        "--top-p",
        type=float,
        default=sampling.top_p,
        metavar="P",
        help="draw from the likeliest tokens whose probabilities sum to P; "
        "1 = from all (default: 1)",
    )
    add(
        "--seed",
        type=int,
        default=0,
        help="seed of the draws; the same seed gives the same text (default: 0)",
    )
    add(
        "--num-samples",
        type=int,
        default=1,
        metavar="N",
        help="texts per prompt (default: 1)",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(exit_code.exit_code(main))
