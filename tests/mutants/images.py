"""Protections of images."""

from tests.mutants.mutant import Mutant

MEMORY = "tests/engine/vision/test_image_memory.py::"

IMAGES = (
    Mutant(
        "features of images count as KV", "engine/slots/slot_kv_manager.py",
        "self.images.n_bytes if self.images else 0", "0",
        MEMORY + "test_features_are_counted_and_dropped_under_pressure",
    ),
    Mutant(
        "features that a prompt needs stay", "engine/vision/encoder.py",
        "self._features.keys() - self._needed_by.keys()", "list(self._features)",
        MEMORY + "test_features_that_a_prompt_needs_are_not_dropped",
    ),
    Mutant(
        "a cancelled request frees its pixels", "engine/step.py",
        "self.slot_kv.release_images(live.request.id)", "pass",
        MEMORY + "test_a_cancelled_request_frees_its_pixels",
    ),
    Mutant(
        "an encoding that two requests need goes on", "engine/vision/encoder.py",
        "            if not requests:\n", "            if True:\n",
        MEMORY + "test_an_encoding_ends_with_the_last_request_for_it",
    ),
    Mutant(
        "another image has other ids", "core/image.py",
        "hashlib.sha256(image + block", "hashlib.sha256(block",
        "tests/engine/vision/test_images_in_slots.py::test_67_pages_have_67_keys_and_answers",
    ),
)  # fmt: skip
