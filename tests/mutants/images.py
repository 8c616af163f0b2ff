"""Protections of images."""

from tests.mutants.mutant import Mutant

SLOTS = "tests/engine/vision/test_images_in_slots.py::"
MEMORY = "tests/engine/vision/test_image_memory.py::"
DRAFTS = "tests/engine/vision/test_images_and_drafts.py::"

IDENTITY = "tests/engine/vision/test_image_identity.py::"
KEYS = "tests/policy/test_image_keys.py::"

IMAGES = (
    Mutant(
        "the first tokens of a prompt keep their images", "core/prompt_tokens.py",
        "tuple(image for image in self.images if image.end <= end)", "()",
        "tests/text/test_image_prompts.py::test_an_expected_prompt_keeps_its_images",
    ),
    Mutant(
        "a prompt cannot lose its images", "core/prompt_tokens.py",
        "        check_images(self.tokens, self.images)\n", "        pass\n",
        KEYS + "test_a_prompt_cannot_lose_its_images",
    ),
    Mutant(
        "block keys hold the digests of images", "policy/kv/block_hash.py",
        "    if not images:\n", "    if True:\n",
        KEYS + "test_states_are_equal_only_for_equal_images",
    ),
    Mutant(
        "equal ids of two images are no equal tokens", "policy/kv/prefix_index.py",
        "same_until(row.images, cached.images, common_prefix(row.tokens, cached.tokens))",
        "common_prefix(row.tokens, cached.tokens)",
        KEYS + "test_common_tokens_end_where_an_image_differs",
    ),
    Mutant(
        "equal ids of two images are no equal parked tokens", "engine/kv/prefix_cache.py",
        "same_until(own.images, tail.images, upto)", "upto",
        IDENTITY + "test_kv_of_an_image_is_not_used_for_another_of_the_same_ids",
    ),
    Mutant(
        "prefixes are learned up to the first image", "policy/kv/shared_prefixes.py",
        "[image.start for image in request.images] or", "[] or",
        IDENTITY + "test_what_several_agents_share_is_learned_up_to_the_first_image",
    ),
    Mutant(
        "blocks of a tower keep to the bound on stalls", "engine/vision/encoder.py",
        "n_steps = steps_within(seconds, self._step_s)", "n_steps = 27",
        "tests/engine/vision/test_image_stall.py::"
        "test_three_agents_decode_on_while_an_image_joins",
    ),
    Mutant(
        "a block over many patches is cut", "engine/vision/tower.py",
        "                yield hidden, *qkv, *rows, *taps\n",
        "            yield hidden, *qkv, *rows, *taps\n",
        "tests/engine/vision/test_image_stall.py::test_a_block_longer_than_the_bound_is_cut",
    ),
    Mutant(
        "an image beside decoding requests has the seconds of the bound", "engine/loop.py",
        "stall_left(self.stats.speed, policy) if self.batch.is_busy else policy.patience_s",
        "policy.patience_s",
        "tests/engine/vision/test_image_stall.py::"
        "test_three_agents_decode_on_while_an_image_joins",
    ),
    Mutant(
        "features of images count as KV", "engine/slots/slot_kv_manager.py",
        "self.lookup.n_bytes + self.inputs.n_bytes", "self.lookup.n_bytes",
        MEMORY + "test_features_are_counted_and_dropped_under_pressure",
    ),
    Mutant(
        "features that a prompt needs stay", "engine/vision/encoder.py",
        "self._features.keys() - self._needed_by.keys()", "list(self._features)",
        MEMORY + "test_features_that_a_prompt_needs_are_not_dropped",
    ),
    Mutant(
        "a cancelled request frees its pixels", "engine/loop.py",
        "self.batch.inputs.release(request_state.request.id)", "pass",
        MEMORY + "test_a_cancelled_request_frees_its_pixels",
    ),
    Mutant(
        "an encoding that two requests need goes on", "engine/vision/encoder.py",
        "            if not requests:\n", "            if True:\n",
        MEMORY + "test_an_encoding_ends_with_the_last_request_for_it",
    ),
    Mutant(
        "images of one chunk stay together", "engine/vision/encoder.py",
        "if name not in self._needed_by]", "]",
        MEMORY + "test_images_of_one_chunk_are_encoded_once_beyond_the_bound",
    ),
    Mutant(
        "another image has other ids", "text/images/spans.py",
        "hashlib.sha256(image + block", "hashlib.sha256(block",
        SLOTS + "test_67_pages_have_67_keys_and_answers",
    ),
    Mutant(
        "features of a chunk are those of its tokens", "engine/vision/encoder.py",
        "first = sum(is_feature[: max(0, start - image.start)])",
        "first = max(0, start - image.start)",
        SLOTS + "test_an_image_is_cut_anywhere_by_chunks",
    ),
    Mutant(
        "a bomb is refused by its header", "text/images/bounds.py",
        "if max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:", "if False:",
        "tests/text/test_image_bounds.py::test_a_bomb_is_refused_by_its_header",
    ),
    Mutant(
        "a broken image of a history becomes a note", "text/images/reader.py",
        'return f"[image omitted: {refusal}]"', "raise",
        "tests/api/test_image_sessions.py::"
        "test_a_bad_picture_is_a_400_with_its_measure_and_poisons_no_session",
    ),
    Mutant(
        "an image is decoded upright", "text/images/bounds.py",
        "return image.transpose(Image.Transpose[rotation])", "return image",
        "tests/text/test_image_bounds.py::test_the_orientation_of_exif_turns_size_and_pixels",
    ),
    Mutant(
        "each image needs its media marker", "text/images/spans.py",
        "if n_markers != len(images):", "if False:",
        "tests/api/test_served_images.py::test_media_that_cannot_be_placed_is_refused",
    ),
    Mutant(
        "positions after an image are shorter", "engine/vision/seam.py",
        "mrope.delta(images, index) if self.has_mrope else 0", "0",
        "tests/engine/vision/test_whole_models.py::test_logits_are_those_of_mlx_vlm",
    ),
    Mutant(
        "features of lower blocks are added (deepstack)", "engine/vision/seam.py",
        "return out if added is None else out + added", "return out",
        "tests/engine/vision/test_whole_models.py::test_logits_are_those_of_mlx_vlm",
    ),
    Mutant(
        "an image whose tokens attend to each other is one chunk", "core/prompt_tokens.py",
        "return cut.start if cut.start > start else cut.end", "return end",
        "tests/engine/vision/test_gemma3.py::test_a_chunk_ends_before_or_after_an_image",
    ),
    Mutant(
        "tokens of an image of Gemma attend to each other", "engine/model/row_views.py",
        "own = mask[..., -n:] | pairs", "own = mask[..., -n:]",
        "tests/engine/vision/test_whole_models.py::test_logits_are_those_of_mlx_vlm",
    ),
    Mutant(
        "tokens of an image of Gemma 4 attend within windows only", "engine/model/row_views.py",
        "return self.pairs & (indices[:, None] - indices < window)", "return self.pairs",
        "tests/engine/vision/test_whole_models.py::test_logits_are_those_of_mlx_vlm",
    ),
    Mutant(
        "full attention of Gemma 4 stays causal", "engine/model/row_views.py",
        "        if window is None:\n            return None\n",
        "        if window is None:\n            return self.pairs\n",
        "tests/engine/vision/test_whole_models.py::test_logits_are_those_of_mlx_vlm",
    ),
    Mutant(
        "features of Gemma 4 get embeddings per layer of padding", "engine/vision/seam.py",
        "self.placeholder if self.per_layer_token is None else self.per_layer_token",
        "self.placeholder",
        "tests/engine/vision/test_whole_models.py::test_logits_are_those_of_mlx_vlm",
    ),
    Mutant(
        "an image of Gemma needs KV of full precision", "engine/loading/loader.py",
        "images.image_model.is_bidirectional and kv.bits < PLAIN_BITS", "False",
        "tests/engine/vision/test_gemma3.py::test_quantized_kv_takes_no_images",
    ),
    Mutant(
        "a reuse cut inside an image goes back to its start", "core/prompt_tokens.py",
        "next((span.start for span in spans if span.start < n_tokens < span.end), n_tokens)",
        "n_tokens",
        "tests/policy/test_restore.py::"
        "test_no_plan_ends_inside_an_image_and_the_longest_other_one_wins",
    ),
    Mutant(
        "an MTP head gets no virtual ids", "engine/decode/prefill.py",
        "inputs.vocabulary_ids(request.tokens[start : end + 1])",
        "request.tokens[start : end + 1]",
        DRAFTS + "test_drafters_get_the_placeholder_in_place_of_features",
    ),
    Mutant(
        "a draft model gets no virtual ids", "engine/decode/draft_model.py",
        "return [token if token < self._n_vocab else self.placeholder for token in tokens]",
        "return tokens",
        DRAFTS + "test_drafters_get_the_placeholder_in_place_of_features",
    ),
    Mutant(
        "a tower of another converter is counted once", "models/model_files.py",
        "VISION_NAME.fullmatch(name) or ", "",
        "tests/policy/test_weights.py::"
        "test_a13_a_tower_of_another_converter_is_not_counted_twice",
    ),
)  # fmt: skip
