"""Why an image has its score: evidence, feature maps, Grad-CAM, gradients."""
