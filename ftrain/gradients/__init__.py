"""What happens to gradients before an optimizer sees them."""

from ftrain.gradients.accumulation import accumulate as accumulate
from ftrain.gradients.clipping import as_transform as as_transform
from ftrain.gradients.clipping import clip_by_average_norm as clip_by_average_norm
from ftrain.gradients.clipping import clip_by_global_norm as clip_by_global_norm
from ftrain.gradients.clipping import clip_by_norm as clip_by_norm
from ftrain.gradients.clipping import clip_by_value as clip_by_value
from ftrain.gradients.clipping import global_norm as global_norm
from ftrain.gradients.differentiate import value_and_grad as value_and_grad
from ftrain.gradients.guard import guard as guard
from ftrain.gradients.lookup import lookup as lookup
from ftrain.gradients.loss_scaling import loss_scale as loss_scale
from ftrain.gradients.loss_scaling import loss_scaling as loss_scaling
from ftrain.gradients.rows import Rows as Rows
from ftrain.gradients.rows import densify as densify
from ftrain.gradients.rows import map_values as map_values
from ftrain.gradients.sealing import update_with_rows as update_with_rows
from ftrain.gradients.skipping import skipped_updates as skipped_updates
