"""Files -> rows and pictures: one run of `infer`, or a folder that is followed."""
