"""A step of multimodal RL with OpenRLHF's own classes on a CPU, with and without the plane.

python -m examples.openrlhf_rollout                 # by reference, then the same code by value
python -m examples.openrlhf_rollout --only value    # by value alone
"""
