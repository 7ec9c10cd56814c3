"""Checkpoints: names of TensorFlow 1 and their counterparts."""

from ftrain.migration.counterpart import Counterpart, to

TABLE: dict[str, Counterpart] = {
    "tf.train.Saver": to(
        "ftrain.checkpoints.CheckpointManager",
        note="max_to_keep is keep, keep_checkpoint_every_n_hours is keep_every_hours; it saves trees under numbers of "
        "steps, and writes over one only with overwrite=True",
    ),
    "tf.train.Saver.save": to("ftrain.checkpoints.CheckpointManager.save"),
    "tf.train.Saver.restore": to(
        "ftrain.checkpoints.CheckpointManager.restore",
        note="var_list is include, exclude and rename, by patterns",
    ),
    "tf.train.SaverDef": to(
        "ftrain.checkpoints.CheckpointManager",
        note="its arguments; in a config, the table [checkpoint]",
    ),
    "tf.train.Checkpoint": to(
        "ftrain.checkpoints.CheckpointManager",
        note="any tree is saved as it is; open_reader reads TF1's",
    ),
    "tf.train.CheckpointManager": to(
        "ftrain.checkpoints.CheckpointManager", note="max_to_keep is keep"
    ),
    "tf.train.CheckpointOptions": to("ftrain.checkpoints.CheckpointManager", note="its arguments"),
    "tf.train.checkpoint_exists": to("ftrain.checkpoints.checkpoint_exists"),
    "tf.train.latest_checkpoint": to(
        "ftrain.checkpoints.latest_checkpoint", note="of TensorFlow's directories too"
    ),
    "tf.train.get_checkpoint_state": to(
        "ftrain.checkpoints.checkpoint_state",
        "ftrain.formats.parse_state",
        note="the second reads TensorFlow's own `checkpoint` file",
    ),
    "tf.train.update_checkpoint_state": to(
        "ftrain.checkpoints.CheckpointManager",
        note="it keeps checkpoints.json itself, and mends it by what is on disk",
    ),
    "tf.train.generate_checkpoint_state_proto": to(
        "ftrain.formats.format_state", note="the text of TensorFlow's `checkpoint` file"
    ),
    "tf.train.get_checkpoint_mtimes": to(
        "ftrain.checkpoints.CheckpointManager.checkpoints",
        note="each record has the time of its save",
    ),
    "tf.train.remove_checkpoint": to(
        "ftrain.checkpoints.CheckpointManager.delete", note="or ftrain ckpt rm RUN STEP"
    ),
    "tf.train.NewCheckpointReader": to(
        "ftrain.checkpoints.open_reader", note="reads TensorFlow's V2 files too"
    ),
    "tf.train.load_checkpoint": to(
        "ftrain.checkpoints.open_reader", note="reads TensorFlow's V2 files too"
    ),
    "tf.train.list_variables": to(
        "ftrain.checkpoints.list_variables", note="of TensorFlow's V2 files too"
    ),
    "tf.train.load_variable": to(
        "ftrain.checkpoints.load_variable", note="of TensorFlow's V2 files too"
    ),
    "tf.train.init_from_checkpoint": to(
        "ftrain.checkpoints.init_from_checkpoint",
        note="returns a new tree instead of changing variables",
    ),
    "tf.train.warm_start": to(
        "ftrain.checkpoints.warm_start",
        note="returns a new tree; pass the leaves to train",
    ),
    "tf.train.VocabInfo": to("ftrain.checkpoints.VocabInfo"),
    "tf.train.checkpoints_iterator": to(
        "ftrain.checkpoints.checkpoints_iterator", "ftrain.evaluate_checkpoints"
    ),
}
