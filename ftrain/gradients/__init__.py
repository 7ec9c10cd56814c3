"""What happens to gradients before an optimizer sees them."""

from ftrain.gradients.clipping import clip_by_global_norm as clip_by_global_norm
from ftrain.gradients.clipping import global_norm as global_norm
