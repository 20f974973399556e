"""OpenRLHF's PPO with its data in the plane: `python -m dataplane.integrations.openrlhf` takes the options of
`python -m openrlhf.cli.train_ppo_ray`, and runs it with the hook installed."""

import runpy

from dataplane.integrations.openrlhf.hook import install

if __name__ == "__main__":
    install()
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
