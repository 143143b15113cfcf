"""Planners by name: those of this package, and those that a user registers or names by an import path."""

from __future__ import annotations

import difflib
import pickle
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from inspect import isfunction
from typing import TYPE_CHECKING

from bagel_wds.errors import BadSample, ConfigError, PlannerError, Reason
from bagel_wds.planners.edit import plan_edit
from bagel_wds.planners.interleaved import plan_interleaved
from bagel_wds.planners.own_plan import PlanFaultError, check_plan, has_loss
from bagel_wds.planners.t2i import plan_t2i
from bagel_wds.planners.vlm import plan_vlm
from bagel_wds.records import SamplePlan
from bagel_wds.redact import redact

if TYPE_CHECKING:
    from collections.abc import Callable

    from bagel_wds.planners.build import PlanTools
    from bagel_wds.records import RawSample
    from bagel_wds.rng import Draws

    Planner = Callable[[RawSample, PlanTools, Draws], SamplePlan]

PLANNERS: dict[str, Planner] = {
    "t2i": plan_t2i,
    "vlm": plan_vlm,
    "edit": plan_edit,
    "interleaved": plan_interleaved,
}
"""What a mixture file can name as the recipe of a group; `register_planner` adds to it."""

BUILT_IN = tuple(PLANNERS)
"""Those of this package."""


@dataclass(frozen=True)
class OwnPlanner:
    """A user's planner, which travels to DataLoader workers as a reference to its function.

    Attributes:
        recipe: that the mixture file names it by.
        plan: the function.
    """

    recipe: str
    plan: Planner

    def __call__(self, sample: RawSample, tools: PlanTools, draws: Draws) -> SamplePlan:
        """The plan of a sample.

        Raises:
            BadSample: as the function does; `no_loss` for a plan of which nothing has loss.
            PlannerError: naming the sample, if the function fails in any other way, or gives no plan that can be.
        """
        try:
            planned = self.plan(sample, tools, draws)
        except BadSample as bad:
            if isinstance(getattr(bad, "reason", None), Reason):
                raise
            raise PlannerError(
                f"recipe {self.recipe!r} refused sample {sample.key!r} of {redact(sample.url)} by {bad!r}, whose reason is none "
                "of bagel_wds.Reason; say one of those, such as BadSample(Reason.ROW_INVALID, ...)"
            ) from bad
        except Exception as error:
            raise PlannerError(
                f"recipe {self.recipe!r} failed on sample {sample.key!r} of {redact(sample.url)}: {error!r}; to leave such "
                "a sample out and count it, raise BadSample(Reason.ROW_INVALID, ...) in the planner"
            ) from error
        if not isinstance(planned, SamplePlan):
            raise PlannerError(
                f"recipe {self.recipe!r} gave {type(planned).__name__} for sample {sample.key!r}, not a SamplePlan; end "
                "the planner with `return plan.build()`"
            )
        try:
            check_plan(planned, sample, tools)
        except BadSample:
            # Of a clip whose header cannot be read.
            raise
        except Exception as error:
            # What stands in the fields of a plan that was not built with PlanBuilder is not known.
            what = error if isinstance(error, PlanFaultError) else repr(error)
            raise PlannerError(
                f"recipe {self.recipe!r} gave a plan that cannot be for sample {sample.key!r} of {redact(sample.url)}: {what}"
            ) from error
        if not has_loss(planned):
            raise BadSample(Reason.NO_LOSS, f"none of the {len(planned.segments)} segments has loss")
        return planned


def register_planner(name: str, plan: Planner) -> None:
    """Let `recipe: NAME` in a mixture file mean a function; call it before the dataset is built.

    Args:
        name: any that this package does not use itself, without a colon.
        plan: `(sample, tools, draws) -> SamplePlan`, at the top level of its module.

    Raises:
        ConfigError: for a name that is taken by another function, a function that workers could not find, or what is none.
    """
    if not isinstance(name, str):
        raise ConfigError(f"register_planner({name!r}, ...): a name is a string, not {type(name).__name__}")
    if not name or ":" in name:
        raise ConfigError(
            f"register_planner({name!r}): a name has no colon, which marks an import path, and is not empty"
        )
    check_callable(f"register_planner({name!r}, ...): the planner", plan)
    there = PLANNERS.get(name)
    if there is not None and (name in BUILT_IN or not _is_same(there, plan)):
        raise ConfigError(f"register_planner({name!r}): the name is taken by {_home(there)}; give another")
    check_portable(name, plan)
    PLANNERS[name] = plan


def _home(plan: Planner) -> str:
    """Where a function is found."""
    if isinstance(plan, partial):
        return f"a partial of {_home(plan.func)}"
    return f"{getattr(plan, '__module__', '?')}:{getattr(plan, '__qualname__', type(plan).__qualname__)}"


def _is_same(there: object, plan: object) -> bool:
    """Whether two planners are one: a module that is loaded again, or a cell that is run again, brings it anew."""
    if isinstance(there, partial) and isinstance(plan, partial):
        return _is_same(there.func, plan.func) and (there.args, there.keywords) == (plan.args, plan.keywords)
    if isfunction(there) and isfunction(plan):
        return _home(there) == _home(plan)
    return bool(there == plan)


def check_callable(where: str, plan: object) -> None:
    """Refuse what is no function, nor works like one.

    Raises:
        ConfigError: saying what it is.
    """
    if isinstance(plan, type):
        raise ConfigError(
            f"{where} is the class {plan.__qualname__}; give a function `(sample, tools, draws)`, or an instance that works as one"
        )
    if not callable(plan):
        raise ConfigError(
            f"{where} is {type(plan).__name__}, not a function; give one that takes `(sample, tools, draws)`"
        )


def check_portable(recipe: str, plan: Planner) -> None:
    """Refuse what could not travel to a DataLoader worker.

    Raises:
        ConfigError: saying so.
    """
    try:
        pickle.dumps(plan)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"recipe {recipe!r}: {_home(plan)} cannot be handed to DataLoader workers, which find it by its name ({error}); "
            "make it a function at the top level of a module, not a lambda or a function inside another"
        ) from error


def find_planner(recipe: str, group: str) -> Planner:
    """The planner that a recipe names: a name that is known here, or `package.module:function`.

    Args:
        recipe: of the mixture file.
        group: that names it, for the error.

    Raises:
        ConfigError: if there is none, or it could not travel to a DataLoader worker.
    """
    if recipe in BUILT_IN:
        return PLANNERS[recipe]
    plan = _import(recipe, group) if ":" in recipe else PLANNERS.get(recipe)
    if plan is None:
        close = difflib.get_close_matches(recipe, PLANNERS, n=1)
        raise ConfigError(
            f"group {group!r}: recipe {recipe!r} is none of {', '.join(PLANNERS)}; "
            + (f"did you mean {close[0]!r}? Else " if close else "")
            + "call register_planner before the dataset is built, or name a function as package.module:function"
        )
    check_portable(recipe, plan)
    return OwnPlanner(recipe, plan)


def _import(recipe: str, group: str) -> Planner:
    module, _, name = recipe.partition(":")
    try:
        plan: Planner = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:
        # What a module of the user's own may raise while it is loaded is not known; a script may end itself.
        raise ConfigError(f"group {group!r}: recipe {recipe!r} cannot be imported: {error!r}") from error
    check_callable(f"group {group!r}: recipe {recipe!r}", plan)
    return plan
