"""
Shows the six charts that matter, of runs that log to W&B or trackio (`report_to: wandb` or `trackio`).

W&B gets a saved view of the project (`pip install wandb-workspaces`, and `wandb login` before):

    python examples/dashboards.py wandb ENTITY PROJECT

trackio's dashboard takes its filter from the address, which this prints. Start it with `trackio show`:

    python examples/dashboards.py trackio PROJECT
"""

import argparse
from typing import Any
from urllib.parse import urlencode


# By title. Trackers show the log's names with `train/` before them, and an evaluation's with `eval/`.
CHARTS = {
    "Idle share of decoding slots": "train/darts/rollout/bubble_ratio",
    "Seconds of a rollout": "train/darts/rollout/seconds",
    "Aborted share of candidates": "train/darts/pool/aborted_ratio",
    "Kept ÷ pool length": "train/darts/selection/kept_vs_pool_length_ratio",
    "Age of the tokens in optimizer steps": "train/darts/staleness/age_mean",
    "Evaluation reward": "eval/reward",
}


def wandb_view(entity: str, project: str) -> Any:
    """Returns a W&B workspace that is not saved yet."""
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces

    panels = [reports.LinePlot(title=title, x="train/global_step", y=[name]) for title, name in CHARTS.items()]
    section = workspaces.Section(name="trl_darts", panels=panels, is_open=True)
    return workspaces.Workspace(
        entity=entity, project=project, name="trl_darts", sections=[section], auto_generate_panels=False
    )


def trackio_address(project: str, url: str) -> str:
    """Returns the address of trackio's dashboard with these charts alone."""
    return f"{url.rstrip('/')}/?{urlencode({'project': project, 'metrics': ','.join(CHARTS.values())}, safe='/,')}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    trackers = parser.add_subparsers(dest="tracker", required=True)
    wandb = trackers.add_parser("wandb")
    wandb.add_argument("entity")
    wandb.add_argument("project")
    trackio = trackers.add_parser("trackio")
    trackio.add_argument("project")
    trackio.add_argument("--url", default="http://127.0.0.1:7860", help="Address that `trackio show` prints.")
    args = parser.parse_args()
    if args.tracker == "wandb":
        print(wandb_view(args.entity, args.project).save().url)
    else:
        print(trackio_address(args.project, args.url))


if __name__ == "__main__":
    main()
