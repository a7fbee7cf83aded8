"""Other libraries' ways to communicate, and the papers', for the simulator `ddp_hooks.planning.simulate`."""

from recipes.paper.strategies.all_reduce import ByteScheduler, DdpOn, MgWfbp
from recipes.paper.strategies.dear import DearOfPaper
from recipes.paper.strategies.horovod import Horovod
from recipes.paper.strategies.tables import EmbRace, SparseDdp, TableTraffic

__all__ = ["ByteScheduler", "DdpOn", "DearOfPaper", "EmbRace", "Horovod", "MgWfbp", "SparseDdp", "TableTraffic"]
