"""`python -m jaxdist.generate --workdir W --prompt TEXT`: text from a run's newest checkpoint."""

import argparse

import jax

from jaxdist.evaluation import trained_run
from jaxdist.inference.decoding import SamplingConfig
from jaxdist.trainer import cli


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    flags = _parser().parse_args(arguments)
    run = trained_run.load_run(**cli.run_options(flags))
    samples = run.generate(
        flags.prompt,
        max_tokens=flags.max_tokens,
        sampling=SamplingConfig(flags.temperature, flags.top_k, flags.top_p),
        seed=flags.seed,
        num_samples=flags.num_samples,
    )
    texts = [sample.text for of_prompt in samples for sample in of_prompt]
    if jax.process_index() == 0:
        for number, text in enumerate(texts, 1):
            print(f"--- {number} of {len(texts)}\n{text}" if len(texts) > 1 else text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = cli.WorkdirParser("generate", __doc__)
    add, sampling = parser.add_argument, SamplingConfig()
    add("--prompt", required=True, action="append", help="how the text begins; may be repeated")
    add("--max-tokens", type=int, default=128, help="new tokens at most (default: 128)")
    add("--temperature", type=float, default=sampling.temperature, help="0 = the likeliest (default: 1)")
    add("--top-k", type=int, default=sampling.top_k, help="only the k likeliest; 0 = all (default)")
    add("--top-p", type=float, default=sampling.top_p, help="the likeliest that sum to it (default: 1 = all)")
    add("--seed", type=int, default=0, help="the same seed gives the same text (default: 0)")
    add("--num-samples", type=int, default=1, help="texts for each prompt (default: 1)")
    return parser


if __name__ == "__main__":
    raise SystemExit(cli.exit_code(main))
