"""The names that a configuration may use are those that exist."""

from __future__ import annotations

import msgspec
import pytest

from agent.core import contract
from conf.schema import ENGINES, FILTERS, METRIC_FIELDS, PICKERS, Endpoint, Picker
from conf.values import check_metric_place


def choices(cls: type[msgspec.Struct], name: str) -> set[str]:
    info = msgspec.inspect.type_info(cls)
    assert isinstance(info, msgspec.inspect.StructType)
    annotated = next(field.type for field in info.fields if field.name == name)
    assert isinstance(annotated, msgspec.inspect.Metadata)
    assert isinstance(annotated.type, msgspec.inspect.LiteralType)
    return set(map(str, annotated.type.values))


def test_engines_are_those_with_a_metric_mapping() -> None:
    assert set(ENGINES) == set(contract.BUILT_IN) == choices(Endpoint, "engine")


def test_metric_fields_are_those_of_the_contract() -> None:
    assert set(METRIC_FIELDS) == set(contract.FIELDS)


def test_pickers_are_those_of_the_schema() -> None:
    assert set(PICKERS) == choices(Picker, "type")
    assert set(FILTERS) == {"health", "draining", "excluded"}


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "",
        "vllm:x{y}",
        'a{b="c"}',
        'a{b="c",d}',
        "a{}",
        "a b",
        "a{ b }",
        'a{b ="c"}',
        "a{b,c}",
        "a{b",
        "1a",
        "a{1}",
        'a{b="c}',
    ],
)
def test_a_metric_name_is_accepted_just_when_the_contract_can_read_it(text: str) -> None:
    def is_refused_by(check: object) -> bool:
        try:
            check()  # type: ignore[operator]
        except (ValueError, contract.MappingError):
            return True
        return False

    refused = is_refused_by(lambda: check_metric_place(text))
    assert refused == is_refused_by(lambda: contract.mapping_for("vllm", {"vllm": {"waiting": text}}))
