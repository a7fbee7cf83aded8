"""One way to talk: algorithms as generators, three executors, lanes, accounting and agreement."""

from ddp_hooks.comm.accounting import Recorder, Span, Stall, Traffic, mebibytes
from ddp_hooks.comm.agreement import agree, agree_on_node_size, compare
from ddp_hooks.comm.algorithms.bruck import bruck_all_gather, num_rounds
from ddp_hooks.comm.algorithms.collectives import (
    Partition,
    aligned_bounds,
    direct_reduce_scatter,
    pairwise_exchange,
    ring_all_gather,
)
from ddp_hooks.comm.algorithms.exchange import Algorithm, Recv, Round, Send, among, round_of, without_messages
from ddp_hooks.comm.algorithms.two_level import sum_within_node
from ddp_hooks.comm.executors.fabric import AlphaBeta, run_on_fabric
from ddp_hooks.comm.executors.lanes import Lanes
from ddp_hooks.comm.executors.thread_lane import LaneSettings, special_tag
from ddp_hooks.comm.executors.work import ThreadWork, Work
from ddp_hooks.comm.exit_handler import at_exit
from ddp_hooks.comm.failure import LaneError, LaneTimeout
from ddp_hooks.comm.meeting import Patience, broadcast_object, calling, gather_objects, report_error
from ddp_hooks.comm.nodes import Nodes, ranks_per_node
from ddp_hooks.comm.probe import LinkProfile, profile_link, suited_to
from ddp_hooks.comm.saved import find_problem_of_ranks, find_problem_of_shapes, sum_by_name
from ddp_hooks.comm.strides import in_order_of, in_storage_order, is_dense, shaped_like
from ddp_hooks.comm.torch_compat.state_dict import read_metadata
from ddp_hooks.comm.validation import (
    above,
    at_least,
    check_booleans,
    check_node_size,
    check_slice,
    check_waits,
    check_whole,
    positive,
    refuse_unused,
    see,
    whole,
    wrong_state,
)
from ddp_hooks.comm.wire.codecs import Codec, CodecName, codec_of
from ddp_hooks.comm.wire.exact import ExactWire
from ddp_hooks.comm.wire.exact_native import ExactNativeWire
from ddp_hooks.comm.wire.narrow import NarrowGather
from ddp_hooks.comm.wire.residuals import Residuals
from ddp_hooks.comm.wire.rounded import DifferenceWire, RoundedWire

__all__ = [  # noqa: RUF022 - by topic
    # algorithms: rounds of messages
    "Algorithm", "Nodes", "Partition", "Recv", "Round", "Send", "aligned_bounds", "among", "bruck_all_gather",
    "direct_reduce_scatter", "num_rounds", "pairwise_exchange", "ranks_per_node", "ring_all_gather", "round_of",
    "sum_within_node", "without_messages",
    # wire: how numbers travel
    "Codec", "CodecName", "DifferenceWire", "ExactNativeWire", "ExactWire", "NarrowGather", "Residuals", "RoundedWire",
    "codec_of",
    # executors: lanes, and the fabric in one process
    "AlphaBeta", "LaneSettings", "Lanes", "LinkProfile", "ThreadWork", "Work", "profile_link", "run_on_fabric",
    "special_tag", "suited_to",
    # accounting
    "Recorder", "Span", "Stall", "Traffic", "mebibytes",
    # failures, and the end of a process
    "LaneError", "LaneTimeout", "at_exit", "see", "wrong_state",
    # meetings and agreement of ranks
    "Patience", "agree", "agree_on_node_size", "broadcast_object", "calling", "compare", "gather_objects",
    "report_error",
    # settings, tensors and checkpoints
    "above", "at_least", "check_booleans", "check_node_size", "check_slice", "check_waits", "check_whole",
    "find_problem_of_ranks", "find_problem_of_shapes", "in_order_of", "in_storage_order", "is_dense", "positive",
    "read_metadata", "refuse_unused", "shaped_like", "sum_by_name", "whole",
]
