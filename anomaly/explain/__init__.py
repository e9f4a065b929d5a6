"""Reasons for an image's score: evidence, feature maps, Grad-CAM, gradients."""
