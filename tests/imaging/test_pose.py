"""The part's pose: known motions of drawn parts, the way back, what has no pose."""

import math
from dataclasses import replace

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import bgr
from moving_parts import SIZE, draw, place, poses

from anomaly.errors import DataError
from anomaly.imaging.alignment import Motion, Pose, Reference, grey_picture, learn
from anomaly.imaging.arrays import source_of
from anomaly.imaging.geometry import Sizing, patch_mask, render
from anomaly.imaging.read import DEFAULT, Image

_CORNERS = [(-50.0, -30.0), (50.0, -10.0), (-50.0, 30.0), (50.0, 30.0)]


def image(picture: np.ndarray) -> Image:
    source = source_of(bgr(picture), DEFAULT)
    assert isinstance(source, Image)
    return source


def learned(given: list, *, rigid: bool = True) -> tuple[Reference, int]:
    return learn([grey_picture(image(draw(p, i))) for i, p in enumerate(given)], rigid=rigid)


@pytest.mark.parametrize(("rigid", "turn"), [(True, 180), (False, 0)])
def test_poses_are_found_within_a_quarter_of_a_pixel(rigid: bool, turn: float) -> None:
    known = poses(16, 5, turn)
    reference, index = learned(known, rigid=rigid)
    middle = known[index]
    for i, pose in enumerate(poses(12, 6, turn)):
        motion = reference.pose(image(draw(pose, 50 + i))).motion
        # A point of the part as it lies in the reference image is moved to where it lies in this.
        points = place(_CORNERS, middle) - 0.5
        moved = np.hstack([points, np.ones((4, 1))]) @ motion.matrix(SIZE).T
        np.testing.assert_allclose(moved, place(_CORNERS, pose) - 0.5, atol=0.25)
        apart = math.degrees(motion.turn) - (pose[0] - middle[0])
        assert abs(math.remainder(apart, 360)) < 0.25


def test_light_and_depth_change_no_pose() -> None:
    reference, _ = learned(poses(12, 5))
    picture = draw(poses(1, 7)[0]).astype(np.uint16)
    darker = image((picture * 120 + 4000).astype(np.uint16))
    one, two = (reference.pose(i).motion for i in (image(picture.astype(np.uint8)), darker))
    np.testing.assert_allclose(one, two, atol=0.05)


def test_the_network_sees_every_part_as_the_middle_one_lies() -> None:
    known = poses(16, 5)
    reference, index = learned(known)
    view = Sizing(None, None, 128, 32).view(SIZE)
    expected = render(draw(known[index], 1), 255, view)
    for i, pose in enumerate(known):
        pixels = draw(pose, 50 + i)
        seen = replace(view, pose=reference.pose(image(pixels)))
        assert np.abs(render(pixels, 255, seen) - expected).mean() < 0.025
    assert np.abs(render(draw(known[0]), 255, view) - expected).mean() > 0.04


@settings(max_examples=30)
@given(st.integers(0, 100), st.integers(1, 60), st.integers(0, 130), st.integers(1, 70))
def test_a_box_is_cut_out_of_the_whole(top: int, height: int, left: int, width: int) -> None:
    pose = Pose(Motion(0.4, 9.3, -4.6), SIZE)
    pixels = draw((0, 0, 0))
    whole = pose.to_part(pixels, slice(0, SIZE[0]), slice(0, SIZE[1]))
    rows, columns = slice(top, top + height), slice(left, left + width)
    # OpenCV rounds places to fractions of a pixel, from wherever a cut begins.
    difference = pose.to_part(pixels, rows, columns).astype(int) - whole[rows, columns]
    assert np.abs(difference).max() <= 12


def test_maps_come_back_to_where_they_were_taken() -> None:
    pose = Pose(Motion(math.radians(30), 12.0, -7.0), SIZE)
    rows, columns = np.indices(SIZE).astype(np.float32)
    smooth = np.sin(rows / 15) + np.cos(columns / 20)
    part = pose.to_part(smooth[..., None].repeat(3, 2), *map(slice, (0, 0), SIZE))[..., 0]
    back = pose.to_image(part, slice(None))
    inner = cv2.erode(np.isfinite(back).astype(np.uint8), np.ones((5, 5))) > 0
    np.testing.assert_allclose(back[inner], smooth[inner], atol=0.02)
    strip = slice(40, 90)
    np.testing.assert_allclose(pose.to_image(part, strip), back[strip], atol=0.02)
    # What the reference image doesn't show isn't known.
    corner = np.linalg.inv(np.vstack([pose.motion.matrix(SIZE), [0, 0, 1]])) @ (0, 0, 1)
    assert np.isnan(back[0, 0]) == bool((corner[:2] < 0).any())


def test_unknown_stays_unknown_on_its_way_back() -> None:
    values = np.ones(SIZE, np.float32)
    values[:80] = np.nan
    back = Pose(Motion(0.0, 0.0, 10.0), SIZE).to_image(values, slice(None))
    assert np.isnan(back[:90]).all()
    np.testing.assert_array_equal(back[91:], 1)


def test_what_no_training_image_showed_is_doubted() -> None:
    reference, _ = learned(poses(24, 5, turn=5, shift=6))

    def reason(picture: np.ndarray) -> str:
        return reference.pose(image(picture)).reason

    assert not any(reason(draw(pose, i)) for i, pose in enumerate(poses(20, 6, 5, 6)))
    assert "turned by +4" in reason(draw((45, 0, 0)))
    assert "of the image's width" in reason(draw((0, 40, 0)))
    assert "of the image's height" in reason(draw((0, 0, -30)))
    disc = cv2.circle(np.full((*SIZE, 3), 200, np.uint8), (100, 80), 40, (30, 30, 30), -1)
    for other in (np.full((*SIZE, 3), 90, np.uint8), disc):
        assert "pose can't be found" in reason(other)
    with pytest.raises(DataError, match="another shape"):
        reference.pose(image(draw((0, 0, 0))[:, :150]))
    few, _ = learned(poses(3, 5))  # which bound no motion
    assert few.pose(image(draw((100, 30, 9)))).reason == ""


@pytest.mark.parametrize("kind", ["noise", "weave"])
def test_surfaces_have_no_pose(kind: str) -> None:
    pictures = []
    for seed in range(12):
        rng = np.random.default_rng(seed)
        rows, columns = np.indices((96, 96)) + rng.uniform(0, 16, (2, 1, 1))
        weave = np.sin(rows * math.tau / 8) * np.sin(columns * math.tau / 8)
        grain = cv2.GaussianBlur(rng.normal(size=(96, 96)), (0, 0), 3)
        pictures.append((weave if kind == "weave" else grain).astype(np.float32))
    for rigid in (True, False):
        with pytest.raises(DataError, match="there is no part to align"):
            learn(pictures, rigid=rigid)


def test_a_reference_is_saved() -> None:
    reference, _ = learned(poses(9, 5))
    again = Reference.from_tensors(reference.tensors(), rigid=True)
    picture = image(draw((3, 4, 5)))
    assert again.pose(picture) == reference.pose(picture)


def test_patches_that_a_motion_uncovers_dont_count() -> None:
    view = Sizing(None, None, 128, 32).view(SIZE)
    pose = Pose(Motion(math.radians(20), 30.0, -8.0), SIZE)
    counts = patch_mask(None, replace(view, pose=pose), (16, 16))
    # OpenCV moves an image that is there everywhere.
    white = np.ones((*SIZE, 3), np.uint8)
    there = cv2.warpAffine(
        white[..., 0], pose.motion.matrix(SIZE), SIZE[::-1],
        flags=cv2.INTER_NEAREST | cv2.WARP_INVERSE_MAP,
    )  # fmt: skip
    middles = [((np.arange(16) + 0.5) * side / 16).astype(int) for side in SIZE]
    assert (counts == there[np.ix_(*middles)]).mean() > 0.98
    assert 0.7 < counts.mean() < 0.95
    assert patch_mask(None, view, (16, 16)).all()
