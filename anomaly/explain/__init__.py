"""What else hooks are good for: feature-map pictures, Grad-CAM, gradient monitoring."""
