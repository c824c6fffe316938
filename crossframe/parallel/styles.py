"""The parallel style of a module: on which dim which model axis of the mesh divides its parameters (R39)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from types import MappingProxyType

from crossframe.errors import UsageError
from crossframe.mesh import EXPERT, TENSOR
from crossframe.params import ParamSpec
from crossframe.quoting import quote


class Style(StrEnum):
    """How a module is divided over a model axis. The names are those of torch's `ParallelStyle` classes.

    COLWISE: the output features of a linear over "tp": dim 0 of weight and bias.
    ROWWISE: the input features of a linear over "tp": dim 1 of the weight; the bias is replicated.
    VOCAB: the rows of an embedding over "tp": dim 0, as `RowwiseParallel` divides an embedding.
    SEQUENCE: parameters are replicated, and the activations are divided over "tp" by positions, as by `SequenceParallel`.
    EXPERTS: the experts over "ep": dim 0 of parameters that stack them, or whole modules if these are numbered.
    REPLICATED: not divided.
    """

    COLWISE = "colwise"
    ROWWISE = "rowwise"
    VOCAB = "vocab"
    SEQUENCE = "sequence"
    EXPERTS = "experts"
    REPLICATED = "replicated"

    @property
    def axis(self) -> str | None:
        """The mesh axis that it concerns."""
        return {Style.EXPERTS: EXPERT, Style.REPLICATED: None}.get(self, TENSOR)

    def dim(self, num_dims: int) -> int | None:
        """The divided dim of a parameter with so many dims; None if it is replicated."""
        if self is Style.ROWWISE:
            return 1 if num_dims > 1 else None
        return 0 if self in (Style.COLWISE, Style.VOCAB, Style.EXPERTS) else None


Rules = Sequence[tuple[str, Style]]
"""(pattern of module names, style) in order; the last pattern that matches decides."""

KNOWN_STYLES: Mapping[str, Style] = MappingProxyType(
    {
        # Llama and models with its names in Hugging Face's transformers
        "*embed_tokens": Style.VOCAB,
        "*.q_proj": Style.COLWISE,
        "*.k_proj": Style.COLWISE,
        "*.v_proj": Style.COLWISE,
        "*.o_proj": Style.ROWWISE,
        "*.gate_proj": Style.COLWISE,
        "*.up_proj": Style.COLWISE,
        "*.down_proj": Style.ROWWISE,
        "*lm_head": Style.COLWISE,
        # the GPTs that are trained here
        "token_embedding": Style.VOCAB,
        "*.attention.query": Style.COLWISE,
        "*.attention.key": Style.COLWISE,
        "*.attention.value": Style.COLWISE,
        "*.attention.out": Style.ROWWISE,
        "*.mlp.up": Style.COLWISE,
        "*.mlp.down": Style.ROWWISE,
        "head": Style.COLWISE,
        # mixtures of experts
        "*.experts": Style.EXPERTS,
    }
)
"""The styles of modules by the names that public models have."""


@dataclass(frozen=True)
class Styled:
    """A parameter's style and the module that the style was given to."""

    style: Style
    module: str

    def expert_of(self, param: ParamSpec) -> int | None:
        """The number of the expert that a parameter belongs to; None if it stacks the experts."""
        found = re.match(r"(\d+)\.", param.name[len(self.module) + 1 :])
        return int(found[1]) if self.style is Style.EXPERTS and found else None


def styled(params: Sequence[ParamSpec], rules: Rules) -> dict[str, Styled]:
    """The style of each parameter that a rule concerns, by name.

    A rule matches the module that has the parameter, or any module around it if its style is EXPERTS.

    Raises:
        UsageError: a rule that matches no parameter.
    """
    found: dict[str, Styled] = {}
    for pattern, style in rules:
        matched = False
        for param in params:
            module = next((each for each in _modules(param.name, style) if fnmatchcase(each, pattern)), None)
            if module is not None:
                matched = True
                found[param.name] = Styled(style, module)
        if not matched:
            example = next(iter(_modules(params[0].name, Style.COLWISE)), "") if params else ""
            raise UsageError(
                f"style {style.value!r}: no module with parameters matches {quote(pattern)}: expected the name of a module, for "
                f"instance {quote(example)}, with * for any characters"
            )
    return found


def known_rules(params: Sequence[ParamSpec]) -> Rules:
    """The rules of KNOWN_STYLES that match a parameter."""
    return [
        (pattern, style)
        for pattern, style in KNOWN_STYLES.items()
        if any(fnmatchcase(module, pattern) for param in params for module in _modules(param.name, style))
    ]


def _modules(name: str, style: Style) -> Iterator[str]:
    """The modules that a rule of this style may name to concern a parameter, the nearest first."""
    module = name.rpartition(".")[0]
    yield module
    while style is Style.EXPERTS and module:
        module = module.rpartition(".")[0]
        yield module
