"""A step of multimodal RL with OpenRLHF's own classes on a CPU, with and without the plane.

python -m examples.openrlhf_rollout            # by reference
python -m examples.openrlhf_rollout --plain    # the same code, by value
"""
