"""An emulated cluster: every worker in its own network namespace, behind a link of the rate you name.

    python -m recipes.cluster --workers 4 --rate 1gbit -- python train.py

    with Cluster(4, "1gbit") as cluster:
        exit_code = cluster.run([sys.executable, "train.py"])

Workers see one another and nothing else: the host's network is neither used nor changed. Without root they
run as root of a user namespace of their own; the files they write still belong to you. They all share this
machine's cores and GPUs, so past a few Gbit/s the processor is the limit: look at the measured rate.
"""

from recipes.cluster.cluster import Cluster, why_unavailable
from recipes.cluster.needs import ClusterUnavailable
from recipes.cluster.selfcheck import LinkSpeed

__all__ = ["Cluster", "ClusterUnavailable", "LinkSpeed", "why_unavailable"]
