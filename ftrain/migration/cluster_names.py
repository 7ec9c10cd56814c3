"""Clusters, servers and placement: names of TensorFlow 1 and their counterparts."""

from ftrain.migration.counterpart import Counterpart, to

TABLE: dict[str, Counterpart] = {
    # jobs and tasks
    "tf.train.ClusterSpec": to(
        "ftrain.cluster.ClusterSpec", note="the same class; also ClusterSpec.load('nodes.toml')"
    ),
    "tf.train.ClusterSpec.as_cluster_def": to(
        "ftrain.cluster.ClusterSpec.as_cluster_def",
        note="a dict, the message's JSON form; as_cluster_def_text() is its text format",
    ),
    "tf.train.ClusterSpec.as_dict": to("ftrain.cluster.ClusterSpec.as_dict"),
    "tf.train.ClusterSpec.job_tasks": to("ftrain.cluster.ClusterSpec.job_tasks"),
    "tf.train.ClusterSpec.jobs": to("ftrain.cluster.ClusterSpec", note="spec.jobs"),
    "tf.train.ClusterSpec.num_tasks": to("ftrain.cluster.ClusterSpec.num_tasks"),
    "tf.train.ClusterSpec.task_address": to("ftrain.cluster.ClusterSpec.task_address"),
    "tf.train.ClusterSpec.task_indices": to("ftrain.cluster.ClusterSpec.task_indices"),
    "tf.train.ClusterDef": to(
        "ftrain.cluster.ClusterSpec",
        note="made from the message as well, or from the same as a dict",
    ),
    "tf.train.JobDef": to(
        "ftrain.cluster.ClusterSpec",
        note="a job is a list of addresses, or a dict of index to address",
    ),
    # servers
    "tf.train.ServerDef": to(
        "ftrain.cluster.Membership",
        "ftrain.cluster.membership",
        note="the spec with the job and index of this process; membership() reads TF_CONFIG, SLURM, Kubernetes and MPI",
    ),
    "tf.train.Server": to(
        "ftrain.cluster.connect", note="joins the processes; there is no server to send graphs to"
    ),
    "tf.train.Server.create_local_server": to(
        "ftrain.cluster.create_local", note="a process group of one"
    ),
    "tf.train.Server.target": to(
        "ftrain.cluster.connect",
        note="not needed: once connected, every process runs the same program",
    ),
    "tf.train.Server.server_def": to("ftrain.cluster.Membership"),
    "tf.train.Server.start": to("ftrain.cluster.connect", note="not needed: connecting starts it"),
    "tf.train.Server.join": to(
        "ftrain.cluster.connect",
        note="not needed: no process only serves; parameters live on the devices of the mesh",
    ),
    # placement
    "tf.train.replica_device_setter": to(
        "ftrain.cluster.Sharding",
        "ftrain.migration.replica_device_setter",
        note="Sharding splits parameters over the mesh and replaces it; the other only reports where "
        "TF1 placed variables",
    ),
    "tf.contrib.training.GreedyLoadBalancingStrategy": to(
        "ftrain.migration.greedy_by_bytes",
        note="replica_device_setter(ps_strategy=greedy_by_bytes)",
    ),
    "tf.contrib.training.byte_size_load_fn": to(
        "ftrain.migration.Operation", note="operation.nbytes"
    ),
}
