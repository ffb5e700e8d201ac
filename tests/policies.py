"""Builds policies for small rollouts in tests."""

from dataclasses import replace

from trl_darts.scheduling import BatchStop, Placement, SchedulePolicies, ScheduleSettings, TailPolicy


def make_policies(
    schedule: str,
    num_generations: int,
    batch_stop: BatchStop | None = None,
    placement: Placement | None = None,
    tail: TailPolicy | None = None,
    **fields,
) -> SchedulePolicies:
    """Builds policies with the paper's wait for the long end, unless `fields` change it."""
    settings = ScheduleSettings(schedule, num_generations, **{"long_end_patience": None, **fields})
    return replace(settings.policies(batch_stop=batch_stop, placement=placement), tail=tail)
