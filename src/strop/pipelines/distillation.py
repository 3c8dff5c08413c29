"""Whether a stage that is called distillation is one: what it imitates is a teacher's, and the teacher is another model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from strop.pipelines.data_config import ExportStage, MixStage, RejectionSamplingStage
from strop.pipelines.stage_config import ModelStage, SftStage, Stage, init_of


def problem_with_distillation(name: str, stages: Mapping[str, Stage]) -> str:
    """Why the stage `name`, an `SftStage` of a recipe's `stages`, is no distillation; empty where it is.

    A mix may hold other conversations beside a teacher's: DeepSeek-R1's students imitate its 600K responses and 200K others.
    """
    student = stages[name]
    assert isinstance(student, SftStage)
    line = list(_line_of(student.init, stages))
    for source in student.data:
        teachers = list(_teachers_of(source, stages))
        if not teachers:
            return (
                f"stages.{name}.data names {source!r}, which has no rollouts of a teacher, and kind = 'distil' imitates one."
                " Name a stage of kind 'rejection_sampling', or a mix that has one; or set kind = 'sft'."
            )
        for teacher in teachers:
            if any(_is_one_model(teacher, each, stages) for each in line):
                is_it = "is that model" if teacher == student.init else "that model stands on"
                return (
                    f"stages.{name}.init is {student.init!r}, and what {source!r} has was written by {teacher!r}, which"
                    f" {is_it}. Nobody is its own teacher: start from another model; or set kind = 'sft'."
                )
    return ""


def _teachers_of(source: str, stages: Mapping[str, Stage]) -> Iterator[str]:
    """The stages whose models wrote conversations of `source`, through mixes."""
    stage = stages[source]
    if isinstance(stage, RejectionSamplingStage):
        yield stage.init
    elif isinstance(stage, MixStage):
        for each in stage.data:
            yield from _teachers_of(each, stages)


def _line_of(name: str, stages: Mapping[str, Stage]) -> Iterator[str]:
    """`name`, and the stages that its model was trained from."""
    while name:
        yield name
        name = init_of(stages[name])


def _is_one_model(one: str, other: str, stages: Mapping[str, Stage]) -> bool:
    """Whether two stages make the same weights: they are one stage, or an export of it, or take them from one place."""
    first, second = _exported(stages[one], stages), _exported(stages[other], stages)
    if isinstance(first, ModelStage) and isinstance(second, ModelStage) and first.path is not None:
        return first.path == second.path
    return first is second


def _exported(stage: Stage, stages: Mapping[str, Stage]) -> Stage:
    """What an export hands on; of any other stage, itself."""
    while isinstance(stage, ExportStage):
        stage = stages[stage.init]
    return stage
