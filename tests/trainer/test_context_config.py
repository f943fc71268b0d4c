"""Which runs may split sequences over `mesh.context`: what cannot be is a line, before
anything compiles.
"""

from dataclasses import dataclass

import pytest

from jaxdist import train
from jaxdist.config import EXIT_CONFIG, ConfigError, files
from jaxdist.models.transformer import TransformerConfig
from jaxdist.ops.costs import Cost
from jaxdist.trainer import compose, exit_code, run_config, step_lines, validation


def run_of(name: str = "quickstart", **changes) -> run_config.RunConfig:
    run = run_config.from_config(files.load(name, folders=files.packaged_folders()))
    return compose.with_overrides(
        run, {path.replace("__", "."): value for path, value in changes.items()}
    )


HEADS = {
    "model__num_heads": 12,
    "model__num_kv_heads": 4,
    "context__attention": "heads",
}
FAULTS = {
    "length": (
        {"batch__sequence_length": 100},
        "batch.sequence_length=100 .*mesh.context=8.* 96 or 104",
    ),
    "short": ({"batch__sequence_length": 4}, "nearest legal lengths: 8"),
    "heads": (
        HEADS,
        "12 query heads are not divisible by mesh.context=8; .*auto, which takes gather here",
    ),
    "ring": (
        {"batch__sequence_length": 104, "context__attention": "ring"},
        r"104 is not divisible by 2 x mesh.context=8 \(context.attention=ring\); .* 96 or 112",
    ),
    "form": ({"context__attention": "rings"}, "context.attention.*'rings'"),
    "slices": (
        {"mesh__dcn__context": 2, "mesh__dcn__data": 1},
        "mesh.dcn.context=2: .*mesh.dcn.force=true",
    ),
}


@pytest.mark.parametrize(("changes", "text"), FAULTS.values(), ids=FAULTS)
def test_what_cannot_be_is_said_in_a_line(changes, text):
    with pytest.raises(ConfigError, match=text):
        validation.validate_on(
            run_of(mesh__context=8, **changes), 8, 2 if "slices" in text else None
        )


def test_images_have_no_sequence_to_split():
    with pytest.raises(
        ConfigError, match="mesh.context=8: data.source=.* no sequences"
    ):
        validation.validate_on(
            run_of("vit_digits", mesh__context=8), 8, with_data=False
        )


@dataclass(frozen=True, kw_only=True)
class WholeSequences(Cost):
    """Cost of an op that needs whole sequences."""

    def faults(self, rules):
        if rules.shape.sizes["context"] > 1:
            yield f"mesh.context: {self.name} needs whole sequences; set it to 1"


def test_what_the_cost_of_an_op_refuses_is_a_fault_beside_all_others(monkeypatch):
    costs = TransformerConfig.costs
    convolution = WholeSequences(name="a convolution")

    def with_convolutions(self, length):
        return [*costs(self, length), convolution, convolution]

    monkeypatch.setattr(TransformerConfig, "costs", with_convolutions)
    validation.validate_on(run_of(mesh__context=1), 8)
    with pytest.raises(ConfigError) as error:
        validation.validate_on(run_of(mesh__context=8, batch__sequence_length=100), 8)
    length, refusal = error.value.faults
    assert length.startswith("batch.sequence_length=100 is not divisible")
    assert refusal == "mesh.context: a convolution needs whole sequences; set it to 1"


def test_auto_takes_what_divides_and_says_so():
    run = run_of(mesh__context=8, model__num_heads=12, model__num_kv_heads=4)
    rules = validation.validate_on(run, 8).rules
    (line,) = step_lines.context_lines(run, rules)
    assert line.startswith(
        "context 8: attention by gather: 12 query heads are not divisible"
    )
    rules = validation.validate_on(run_of(mesh__context=4), 8).rules
    (line,) = step_lines.context_lines(run_of(mesh__context=4), rules)
    assert line.startswith("context 4: attention by heads: 4 heads divide by 4")
    rules = validation.validate_on(run_of(), 8).rules
    assert not step_lines.context_lines(run_of(), rules)


def test_the_command_ends_with_the_code_of_configurations(tmp_path, capsys):
    words = [
        "--config",
        "quickstart",
        "--workdir",
        str(tmp_path),
        "--config.mesh.context=8",
    ]
    code = exit_code.exit_code(
        lambda: train.main([*words, "--config.batch.sequence_length=100"])
    )
    assert code == EXIT_CONFIG
    assert "nearest legal lengths: 96 or 104" in capsys.readouterr().err


def test_the_form_may_change_on_resume():
    one, other = (
        run_of(mesh__context=n, context__attention=form)
        for n, form in ((4, "heads"), (8, "gather"))
    )
    assert run_config.run_fingerprint(one) == run_config.run_fingerprint(other)
