"""Fetch the model that `pegboard serve` uses if none is named, and print its path. Later calls find
it in the cache."""

from pegboard.config.schema import Settings
from pegboard.log import set_up_logging
from pegboard.plan.engine_plan import resolve

if __name__ == "__main__":
    set_up_logging("WARNING")
    plan, _ = resolve(Settings())
    print(plan.checkpoint.path)
