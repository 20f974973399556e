"""Steps of multimodal RL with OpenRLHF's own classes on a CPU, by reference and by value.

python -m examples.openrlhf_rollout                 # by reference, then the same code by value
python -m examples.openrlhf_rollout --only value    # by value alone
"""
