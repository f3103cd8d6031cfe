import faulthandler, sys, os, torch, torch.nn as nn, torch.distributed as dist
from tests.harness import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from tests.parity import with_rung
from tests.tasks import TASKS
from rung.config import RunConfig
def func(kind):
    faulthandler.enable()
    torch.cuda.set_device(0); dist.init_process_group("gloo")
    mesh=init_device_mesh("cuda",(2,))
    t=torch.arange(10.,device="cuda")[:,None]*torch.ones(3,device="cuda")
    d=distribute_tensor(t,mesh,[Shard(0)],src_data_rank=None)
    if kind=="gather": return float(d.full_tensor().detach().sum())
    if kind=="gather5":
        d=distribute_tensor(t[:5].contiguous(),mesh,[Shard(0)],src_data_rank=None); return float(d.full_tensor().sum())
    if kind=="norm":
        from torch.nn.utils import get_total_norm
        return float(get_total_norm([d]).full_tensor())
def rung(strategy):
    faulthandler.enable()
    return with_rung(TASKS["text"],strategy,RunConfig(batch_size=8,steps=2,precision="fp64",device="cuda",backend="gloo")).losses
if __name__=="__main__":
    for f,a in [(func,"gather"),(func,"gather5"),(func,"norm"),(rung,"zero3")]:
        try: print(a,"ok",on_ranks(f,2,a,timeout=60),flush=True)
        except AssertionError as e: print(a,"FAIL",str(e)[-600:],flush=True)
