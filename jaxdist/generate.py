"""`python -m jaxdist.generate --workdir W --prompt TEXT`: text from a run's newest checkpoint."""

import argparse

import jax

from jaxdist.config import ConfigError
from jaxdist.evaluation import trained_run
from jaxdist.inference.decoding import SamplingConfig
from jaxdist.trainer import cli


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    flags = _parser().parse_args(arguments)
    if flags.system and not flags.chat:
        raise ConfigError("--system: a turn of a chat; give --chat, too")
    run = trained_run.load_run(**cli.run_options(flags))
    options = {
        "max_tokens": flags.max_tokens,
        "sampling": SamplingConfig(flags.temperature, flags.top_k, flags.top_p),
        "seed": flags.seed,
        "num_samples": flags.num_samples,
    }
    if flags.chat:
        before = [{"role": "system", "content": flags.system}] if flags.system else []
        chats = [[*before, {"role": "user", "content": prompt}] for prompt in flags.prompt]
        samples = run.chat(chats, **options)
    else:
        samples = run.generate(flags.prompt, **options)
    texts = [sample.text for of_prompt in samples for sample in of_prompt]
    if jax.process_index() == 0:
        for number, text in enumerate(texts, 1):
            print(f"--- {number} of {len(texts)}\n{text}" if len(texts) > 1 else text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = cli.WorkdirParser("generate", __doc__)
    add, sampling = parser.add_argument, SamplingConfig()
    add("--prompt", required=True, action="append", help="how the text begins; may be repeated")
    add("--chat", action="store_true", help="prompts are a user's turns; print the assistant's (extra chat)")
    add("--system", metavar="TEXT", help="with --chat: the system's turn, before the user's")
    add("--max-tokens", type=int, default=128, help="new tokens at most (default: 128)")
    add("--temperature", type=float, default=sampling.temperature, help="0 = the likeliest (default: 1)")
    add("--top-k", type=int, default=sampling.top_k, help="only the k likeliest; 0 = all (default)")
    add("--top-p", type=float, default=sampling.top_p, help="the likeliest that sum to it (default: 1 = all)")
    add("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")
    add("--num-samples", type=int, default=1, help="texts for each prompt (default: 1)")
    return parser


if __name__ == "__main__":
    raise SystemExit(cli.exit_code(main))
