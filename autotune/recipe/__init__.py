"""The recipe: the typed YAML that fixes a run.

schema    the shape, with every default and bound
source    YAML text -> plain data with lines
load      file and overrides -> checked recipe, or all problems at once
facts     knob vector and run facts, without building anything
schedule  knob vectors by rollout, to be followed without a controller
"""

from autotune.recipe.facts import facts_from_json, knob_vector, recipe_facts
from autotune.recipe.load import load_control, load_recipe
from autotune.recipe.schedule import KnobSchedule, dump_schedule, load_schedule, schedule_of
from autotune.recipe.schema import ControlSection, Recipe

__all__ = [
    "ControlSection",
    "KnobSchedule",
    "Recipe",
    "dump_schedule",
    "facts_from_json",
    "knob_vector",
    "load_control",
    "load_recipe",
    "load_schedule",
    "recipe_facts",
    "schedule_of",
]
