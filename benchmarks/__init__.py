"""Benchmarks for those who develop Orchestra: `python -m benchmarks.NAME --help`.

    step        a step of AllReduce beside DistributedDataParallel, and beside one process
    fidelity    how well the simulation predicts real runs
    server      pushes and pulls of an asynchronous ParameterServer beside gloo's send and receive
    suspend     the pace of its workers while one of them is suspended
    collectives all-reduces in shared memory and over sockets beside gloo's
    emulated    a step of the ring beside DistributedDataParallel on emulated nodes
    simulation  a simulated training with real gradients beside the plain steps that it consists of
    faults      a campaign of faults under all strategies: what each run promises in trouble
    shapes      how long simulations of time alone take, with 1,024 workers

What a simulation needs to know of the user's own machine is measured by `orchestra calibrate`.
"""
