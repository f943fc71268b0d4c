"""Functions of a key that compute many outputs by the same equations.

A model with many separate layers draws each of their parameters by the same equations
from another key. XLA compiles a program of N such draws in a time that grows faster than
N. Here a loop over the keys makes them, so its body is compiled once.

Models with scanned layers have few outputs that are alike. Their programs stay as they
are.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import (
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
)

_FEWEST = 16  # outputs that are alike, to be made in a loop
# The loop's result is a second copy of its outputs, so larger groups have no loop.
_MOST_NUMBERS = 1 << 28


@dataclass(frozen=True)
class _Part:
    """The equations of one output, and the keys that they begin with."""

    output: Var
    equations: tuple[JaxprEqn, ...]
    keys: tuple[Var, ...]  # those that are folded into the function's own key

    def function(self, debug_info: DebugInfo) -> ClosedJaxpr:
        """Makes the function from the keys to the output."""
        jaxpr = Jaxpr(
            (), self.keys, (self.output,), self.equations, debug_info=debug_info
        )
        return ClosedJaxpr(jaxpr, ())


class RepeatedOutputs:
    """Evaluates a function of a key."""

    def __init__(self, function: ClosedJaxpr) -> None:
        """Finds the outputs that are computed alike.

        Args:
          function: takes one key.
        """
        self._function = function
        (self._key,) = function.jaxpr.invars
        # the names of the results would not fit to some of the outputs
        self._debug_info = function.jaxpr.debug_info._replace(
            arg_names=None, result_paths=None
        )
        self._equations = function.jaxpr.eqns
        # number of the equation that computes a variable
        self._producers = {
            output: number
            for number, equation in enumerate(self._equations)
            for output in equation.outvars
        }
        groups: dict[Hashable, list[_Part]] = defaultdict(list)
        variables = [x for x in function.jaxpr.outvars if not isinstance(x, Literal)]
        for output in dict.fromkeys(variables):
            part = self._part(output)
            if part is not None:
                groups[_signature(part)].append(part)
        self._groups = [group for group in groups.values() if _is_worth_a_loop(group)]

    def __call__(self, key: jax.Array) -> list[jax.Array]:
        """Computes the outputs, in the function's order."""
        outputs = self._function.jaxpr.outvars
        found: dict[int, jax.Array] = {}  # by the id of the output
        for group in self._groups:
            columns = zip(*(part.keys for part in group), strict=True)
            keys = [self._fold(key, column) for column in columns]
            one = jaxpr_as_fun(group[0].function(self._debug_info))
            made = jax.lax.map(lambda names, one=one: one(*names)[0], keys)
            for place, part in enumerate(group):
                found[id(part.output)] = made[place]
        rest = [x for x in outputs if id(x) not in found]
        values = jaxpr_as_fun(self._only(rest))(key)
        for output, value in zip(rest, values, strict=True):
            if isinstance(output, Literal):  # it comes back as a number of Python
                aval: Any = output.aval
                value = jnp.asarray(value, aval.dtype)
            found[id(output)] = value
        return [found[id(x)] for x in outputs]

    def _fold(self, key: jax.Array, folded: Sequence[Var]) -> jax.Array:
        """Folds constants into the function's key, as the equations of `folded` do.

        Returns:
          The keys, [len(folded)].
        """
        equations = [self._equations[self._producers[name]] for name in folded]
        constants = [equation.invars[1].val for equation in equations]
        numbers = jnp.stack([jnp.uint32(constant) for constant in constants])
        # A loop, because the generators of hardware draw other numbers under `vmap`.
        keys: jax.Array = jax.lax.map(
            lambda number: jax.random.fold_in(key, number), numbers
        )
        return keys

    def _only(self, outputs: Sequence[Any]) -> ClosedJaxpr:
        """Makes the function of some outputs, with the equations that they need."""
        jaxpr = self._function.jaxpr
        needed = self._equations_of(outputs)
        equations = [
            equation
            for number, equation in enumerate(self._equations)
            if number in needed or equation.effects  # such as a print
        ]
        only = Jaxpr(
            jaxpr.constvars,
            jaxpr.invars,
            outputs,
            equations,
            jaxpr.effects,
            self._debug_info,
        )
        return ClosedJaxpr(only, self._function.consts)

    def _part(self, output: Any) -> _Part | None:
        """Collects the equations of an output.

        Returns:
          None if the output needs the function's key itself, a constant, or no key.
        """
        keys: dict[Var, None] = {}
        needed = self._equations_of([output], stop=self._folds_key)
        equations = [self._equations[number] for number in sorted(needed)]
        made = {x for equation in equations for x in equation.outvars}
        for operand in [output, *(x for e in equations for x in e.invars)]:
            if isinstance(operand, Literal) or operand in made:
                continue
            if operand not in self._producers:  # the function's key, or a constant
                return None
            keys[operand] = None
        if not keys:
            return None
        return _Part(output, tuple(equations), tuple(keys))

    def _equations_of(
        self,
        outputs: Sequence[Any],
        stop: Callable[[JaxprEqn], bool] = lambda equation: False,
    ) -> set[int]:
        """Finds the equations that outputs need, by their numbers.

        Args:
          outputs: variables or literals.
          stop: whether to leave out an equation, and those that it needs.
        """
        found: set[int] = set()
        pending = list(outputs)
        while pending:
            atom = pending.pop()
            if isinstance(atom, Literal) or atom not in self._producers:
                continue
            number = self._producers[atom]
            equation = self._equations[number]
            if number not in found and not stop(equation):
                found.add(number)
                pending += equation.invars
        return found

    def _folds_key(self, equation: JaxprEqn) -> bool:
        """Tests whether an equation folds a constant into the function's key."""
        if equation.primitive.name != "random_fold_in":
            return False
        key, number = equation.invars
        return key is self._key and isinstance(number, Literal)


def _is_worth_a_loop(group: Sequence[_Part]) -> bool:
    aval: Any = group[0].output.aval
    numbers = math.prod(aval.shape) * len(group)
    has_work = bool(group[0].equations)
    return has_work and len(group) >= _FEWEST and numbers <= _MOST_NUMBERS


def _signature(part: _Part) -> Hashable:
    """Describes the equations of a part, so that equal ones compute alike."""
    numbers: dict[Any, int] = {key: place for place, key in enumerate(part.keys)}
    lines = []
    for equation in part.equations:
        operands = tuple(
            ("literal", str(x.aval), np.asarray(x.val).tobytes())
            if isinstance(x, Literal)
            else numbers[x]
            for x in equation.invars
        )
        for output in equation.outvars:
            numbers[output] = len(numbers)
        outputs = tuple(str(x.aval) for x in equation.outvars)
        lines.append(
            (equation.primitive, _hashable(equation.params), operands, outputs)
        )
    return tuple(lines), numbers[part.output]


def _hashable(params: dict[str, Any]) -> Hashable:
    """Makes the parameters of an equation comparable."""
    out = []
    for name, value in sorted(params.items()):
        try:
            hash(value)
        except TypeError:
            value = repr(value)
        out.append((name, value))
    return tuple(out)
