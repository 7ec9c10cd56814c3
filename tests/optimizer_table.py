"""Every optimizer by name, as a function of the learning rate and the options for its slots."""

from ftrain import optimizers

TABLE = {
    "gradient_descent": lambda lr, **kept: optimizers.gradient_descent(lr, **kept),
    "momentum": lambda lr, **kept: optimizers.momentum(lr, 0.9, **kept),
    "nesterov": lambda lr, **kept: optimizers.momentum(lr, 0.9, use_nesterov=True, **kept),
    "adam": lambda lr, **kept: optimizers.adam(lr, 0.9, 0.99, epsilon=0.01, **kept),
    "adam_not_lazy": lambda lr, **kept: optimizers.adam(
        lr, 0.9, 0.99, epsilon=0.01, lazy=False, **kept
    ),
    "adagrad": lambda lr, **kept: optimizers.adagrad(lr, **kept),
    "adagrad_da": lambda lr, **kept: optimizers.adagrad_da(
        lr, l1_regularization_strength=0.01, **kept
    ),
    "adadelta": lambda lr, **kept: optimizers.adadelta(lr, **kept),
    "rmsprop": lambda lr, **kept: optimizers.rmsprop(lr, momentum=0.5, **kept),
    "rmsprop_centered": lambda lr, **kept: optimizers.rmsprop(
        lr, epsilon=0.01, centered=True, **kept
    ),
    "ftrl": lambda lr, **kept: optimizers.ftrl(lr, l1_regularization_strength=0.01, **kept),
    "proximal_gradient_descent": lambda lr, **kept: optimizers.proximal_gradient_descent(
        lr, 0.01, 0.1, **kept
    ),
    "proximal_adagrad": lambda lr, **kept: optimizers.proximal_adagrad(lr, 0.1, 0.01, 0.1, **kept),
}
