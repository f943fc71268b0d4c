"""Settings of the objective, `objective.*`, and the objective that they choose."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Interval

from jaxdist.config.annotations import (
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    ReadWith,
)
from jaxdist.objectives.distill import Distillation
from jaxdist.objectives.pairs import (
    DirectPreference,
    LossName,
    OddsRatio,
    ReferenceForm,
    SimplePreference,
)
from jaxdist.objectives.reward import BradleyTerry
from jaxdist.protocols.objective import Objective

ObjectiveName = Literal["next_token", "dpo", "orpo", "simpo", "reward", "distill"]
# those whose samples are pairs of answers
PAIR_OBJECTIVES = ("dpo", "orpo", "simpo", "reward")

_DPO = ReadWith("objective.name", ("dpo",))
_BETA = ReadWith("objective.name", ("dpo", "orpo", "simpo"))
_DISTILL = ReadWith("objective.name", ("distill",))
_REWARD = ReadWith("objective.name", ("reward",))
_SIMPO = ReadWith("objective.name", ("simpo",))
_ROBUST = ReadWith("objective.loss", ("robust",))
_FORMS: dict[str, ReferenceForm] = {
    "computed": "field",
    "base": "base",
    "module": "module",
}


@dataclass(frozen=True)
class ObjectiveConfig:
    """What a model is trained for, and the options of its loss."""

    # next_token = the loss of the model itself; dpo, orpo and simpo learn from pairs of
    # a chosen and a rejected answer (data.format=preferences); reward = a reward model,
    # which scores answers (the same data, and model.head=score); distill learns from a
    # teacher
    name: ObjectiveName = "next_token"
    # dpo: loss of a pair
    loss: Annotated[LossName, _DPO] = "sigmoid"
    # dpo: strength of the pull towards the reference; orpo: factor of the odds ratio;
    # simpo: factor of the reward; auto = 2 for simpo, otherwise 0.1
    beta: Annotated[PositiveFloat | Literal["auto"], _BETA] = "auto"
    # share of pairs whose labels are taken to be wrong
    label_smoothing: Annotated[float, Interval(gt=0, lt=0.5), _DPO, _ROBUST] = 0.1
    # dpo: factor of the mean cross-entropy of the chosen answers, as a further term
    sft_weight: Annotated[NonNegativeFloat, _DPO] = 0.0
    # simpo: difference of the rewards that counts as right
    margin: Annotated[NonNegativeFloat, _SIMPO] = 0.5
    # dpo: the model that answers are compared with. computed = log-probabilities of the
    # first weights, computed once before training; base = the model without its adapters
    # (lora.rank), in each step; module = a frozen copy of the first weights, in each
    # step; auto = base if the adapters are new, otherwise computed
    reference: Annotated[Literal["auto", "computed", "base", "module"], _DPO] = "auto"
    # dpo: weights of the reference in place of the first weights: the folder of a Hugging
    # Face model, or of a run; its model and tokenizer must be those of the run
    reference_from: Annotated[str, _DPO] = ""

    # reward: factor of the squared sum of both scores of a pair in its loss, which draws
    # the mean score to 0; 0 = none
    center_weight: Annotated[NonNegativeFloat, _REWARD] = 0.0

    # distill: the teacher, folder of a Hugging Face model or of a run; it needs the
    # vocabulary and the tokenizer of the run
    teacher: Annotated[str, _DISTILL] = ""
    # distill: options of the teacher's model, written by the first start; do not set it
    teacher_model: Annotated[str, _DISTILL] = ""
    # distill: share of the divergence in the loss; the rest is cross-entropy
    alpha: Annotated[float, Interval(ge=0, le=1), _DISTILL] = 0.5
    # distill: divisor of the logits of both models in the divergence
    temperature: Annotated[PositiveFloat, _DISTILL] = 1.0
    # distill: most likely tokens of the teacher that are compared one by one; all other
    # tokens are compared together; at most model.vocab_size
    top_k: Annotated[PositiveInt, _DISTILL] = 64

    @property
    def has_pairs(self) -> bool:
        """Whether samples are pairs of answers."""
        return self.name in PAIR_OBJECTIVES

    @property
    def reads_scores(self) -> bool:
        """Whether the model scores answers at their last tokens."""
        return self.name == "reward"

    def build(self, *, new_adapters: bool) -> Objective | None:
        """Makes the objective; None for the loss of the model itself.

        Args:
          new_adapters: whether the model starts with adapters that change nothing yet.
        """
        beta = self.beta
        if beta == "auto":
            beta = 2.0 if self.name == "simpo" else 0.1
        if self.name == "dpo":
            reference = self.reference
            if reference == "auto":
                is_base = new_adapters and not self.reference_from
                reference = "base" if is_base else "computed"
            is_robust = self.loss == "robust"
            return DirectPreference(
                loss=self.loss,
                beta=beta,
                label_smoothing=self.label_smoothing if is_robust else 0.0,
                sft_weight=self.sft_weight,
                reference=_FORMS[reference],
            )
        if self.name == "orpo":
            return OddsRatio(beta=beta)
        if self.name == "simpo":
            return SimplePreference(beta=beta, margin=self.margin)
        if self.name == "reward":
            return BradleyTerry(self.center_weight)
        if self.name == "distill":
            return Distillation(self.alpha, self.temperature, self.top_k)
        return None


def objective_faults(
    config: ObjectiveConfig,
    *,
    data_format: str,
    has_adapters: bool,
    head: str | None = None,
) -> Iterator[str]:
    """Yields contradictions between an objective, the data and the model.

    Args:
      config: settings of the objective.
      data_format: `data.format`.
      has_adapters: whether the model has adapters.
      head: `model.head`; None = the model has no such option.
    """
    has_pairs = data_format == "preferences"
    if config.has_pairs and not has_pairs:
        yield (
            f"objective.name={config.name} learns from pairs of answers, and "
            f"data.format={data_format} has none; set data.format=preferences"
        )
    if has_pairs and not config.has_pairs:
        yield (
            f"data.format=preferences has pairs of answers, and objective.name="
            f"{config.name} learns from texts; set objective.name=dpo, or data.format=chat"
        )
    if config.reads_scores and head not in (None, "score"):
        yield (
            f"objective.name=reward trains a score of each answer, and model.head={head} "
            f"predicts tokens; set model.head=score"
        )
    if head == "score" and not config.reads_scores:
        yield (
            f"model.head=score predicts no tokens, and objective.name={config.name} "
            f"learns from their probabilities; set objective.name=reward, or "
            f"model.head=language"
        )
    if config.name != "dpo":
        return
    if config.reference == "base" and not has_adapters:
        yield (
            "objective.reference=base is the model without its adapters, and it has "
            "none; set lora.rank, or objective.reference=computed"
        )
    if config.reference == "base" and config.reference_from:
        yield (
            f"objective.reference_from={config.reference_from}: the base of adapters has "
            f"the run's own weights; set objective.reference=computed"
        )
    if config.reference == "module" and has_adapters and not config.reference_from:
        yield (
            "objective.reference=module would keep a second copy of the weights that "
            "lora.rank leaves as they are; set objective.reference=base"
        )
