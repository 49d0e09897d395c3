"""Outputs in this format and what they mean. pytest runs the contract tests of the kind on them."""

from __future__ import annotations

import json

from pegboard_testing.parser_examples import ADD, PARIS, Case, Example, rendered


def write(case: Case) -> str:
    """Return what a model writes to say `case`."""
    calls = [
        f"<function={name}>{json.dumps(arguments, ensure_ascii=False)}</function>"
        for name, arguments in case.calls
    ]
    return case.before + case.between.join(calls) + case.after


EXAMPLES = {
    ("tool_parser", "function_tag"): [
        *rendered(write),
        Example(
            "no end tag", 'Yes. <function=add>{"a": 2, "b": 40}', content="Yes. ", calls=(ADD,)
        ),
        Example(
            "a broken call, a good one",
            '<function=add>a=2</function><function=get_weather>{"city": "Paris"}</function>',
            content="<function=add>a=2",
            calls=(PARIS,),
        ),
    ]
}
