import os, sys

sys.path.insert(0, os.getcwd())
sys.path.insert(0, os.path.join(os.getcwd(), "src"))
import copy, torch, warnings


def go(rows):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    import tests.multi.test_tensor as t

    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    n = dist.get_world_size()
    mesh = init_device_mesh("cuda", (n,))
    orig = t.batches
    t.batches = lambda c: [(a.cuda(), b.cuda()) for a, b in orig(c)]
    t.whole = lambda x: _w(x)
    from rung.parallel.vocabulary import whole_tensor
    from torch.distributed.tensor import DTensor

    def _w(x):
        return (whole_tensor(x) if isinstance(x, DTensor) else x).detach()

    t.whole = _w
    out = []
    for case, o in rows:
        m = t.build(case)
        ref = copy.deepcopy(m).cuda()
        plan = t.plan_of(m, orig(case)[0][0], n, **o)
        m = m.cuda()
        theirs = t.train(ref, case, None)
        t.spread(m, plan, mesh)
        out.append((case, bool(plan.sequence_blocks), t.difference(t.train(m, case, plan), theirs)))
    return out


if __name__ == "__main__":
    print(torch.__version__, torch.cuda.device_count())
    from tests.harness import on_ranks
    import tests.multi.test_tensor as t

    rows = [
        t.ROWS[r]
        for r in (
            "tiny gpt",
            "tiny gpt, whole loss",
            "normed heads",
            "conv1d",
            "encoder",
            "pre-norm, sequence",
            "gated, sequence",
            "mlp",
        )
    ]
    for n in (2, 4):
        for r in on_ranks(go, n, rows, timeout=200)[:1]:
            print(n, r)
