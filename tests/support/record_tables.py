"""The tables of fields in docs/records.md. `.venv/bin/python -m tests.support.record_tables` prints them."""

from pydantic import BaseModel

from harness.results import schema


def tables() -> str:
    """Every model as a Markdown table of fields."""
    parts = [_table(schema.Record, kinds=True)]
    parts += [f"`{name}`: {model.__doc__}\n\n{_table(model)}" for name, model in _PARTS.items()]
    return "\n\n".join(parts)


_PARTS = {
    "against": schema.Against,
    "confirms": schema.Confirms,
    "resources": schema.Resource,
    "breakdown": schema.Breakdown,
    "breakdown: a part": schema.Share,
    "the first line of a run's file": schema.RunLine,
    "shard": schema.Shard,
}


def _table(model: type[BaseModel], kinds: bool = False) -> str:
    described, rows = model.model_json_schema(), []
    for name, field in described["properties"].items():
        of = field.get("of", [])
        row = [f"`{name}`", "yes" if name in described.get("required", ()) else "", _type(field)]
        row += ["all" if of == list(schema.KINDS) else ", ".join(of)] if kinds else []
        rows.append([*row, field.get("description", "")])
    header = ["field", "required", "type", *(["records"] if kinds else []), "meaning"]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows])


def _type(field: dict) -> str:
    """The type of a field's JSON schema in words."""
    words = {"string": "text", "integer": "whole number", "boolean": "true or false", None: "any"}
    found = field.get("anyOf", [field])[0]  # the other one is null
    kind = "object" if "$ref" in found else found.get("type")
    return f"list of {_type(found['items'])}" if kind == "array" else words.get(kind, kind)


if __name__ == "__main__":
    print(tables())
