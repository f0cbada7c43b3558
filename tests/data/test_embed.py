"""Images and texts become one table of vectors per site."""

import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from fedgmm.data import embed as embedding
from fedgmm.data.embed import EmbeddingError, column_name, embed, originals
from fedgmm.data.encoders import encoder
from fedgmm.data.tables.errors import TableError
from fedgmm.data.tables.files import TableFile
from fedgmm.data.tables.loading import load_federation
from fedgmm.data.tables.preprocessing import TableOptions


class MeanColour:
    """Three numbers per image; counts the images that it encodes."""

    name = "colours 1"
    size = 8

    def __init__(self):
        self.calls = 0

    def encode(self, images):
        self.calls += len(images)
        return images.float().mean((2, 3)) / 255


class Lengths:
    """Two numbers per text."""

    name = "lengths 1"
    reads = "texts"

    def encode(self, texts):
        return torch.tensor([[len(t), t.count(" ")] for t in texts]).float()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(embedding, "BATCH_ROWS", 4)
    rng = np.random.default_rng(0)
    for label, colour in (("dark", 20), ("light", 220)):
        (tmp_path / "oslo" / label).mkdir(parents=True)
        for i in range(5):
            pixels = np.clip(rng.normal(colour, 10, (12, 9 + i, 3)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "oslo" / label / f"{i}.png")
    return tmp_path / "oslo"


def vectors_of(site, encoder):
    values = pq.read_table(site.path).column(column_name(encoder)).to_pylist()
    return np.array(values, dtype=float)


def test_a_folder_of_images_becomes_a_table_with_ids_labels_and_vectors(folder, tmp_path):
    own = MeanColour()
    site = embed(folder, tmp_path / "out", own)
    table = pq.read_table(site.path)
    assert site.name == "oslo"
    assert site.rows == table.num_rows == 10
    assert table.column_names == ["id", "label", column_name(own)]
    assert table.schema.field(2).type == pa.list_(pa.float16(), 3)
    assert set(table["label"].to_pylist()) == {"dark", "light"}
    dark = vectors_of(site, own)[np.array(table["label"]) == "dark"]
    np.testing.assert_allclose(dark, 20 / 255, atol=0.04)


def test_a_second_run_does_nothing_and_a_changed_image_is_embedded_again(folder, tmp_path):
    embed(folder, tmp_path / "out", MeanColour())
    own = MeanColour()
    embed(folder, tmp_path / "out", own)
    assert own.calls == 0
    Image.new("RGB", (5, 5), "red").save(folder / "dark" / "0.png")
    site = embed(folder, tmp_path / "out", own)
    assert own.calls == 10
    np.testing.assert_allclose(vectors_of(site, own)[0], [1, 0, 0], atol=1e-3)


def test_an_interrupted_run_uses_its_finished_batches(folder, tmp_path):
    own = MeanColour()

    def stop(name, done, total):
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embed(folder, tmp_path / "out", own, progress=stop)
    assert not (tmp_path / "out" / "oslo.parquet").exists()
    again = MeanColour()
    site = embed(folder, tmp_path / "out", again)
    assert (own.calls, again.calls) == (8, 2)
    np.testing.assert_array_equal(
        vectors_of(site, own), vectors_of(embed(folder, tmp_path / "b", own), own)
    )
    assert not list((tmp_path / "out").glob(".*"))


def test_a_damaged_image_is_named_and_skipped_also_after_an_interruption(folder, tmp_path):
    (folder / "dark" / "1.png").write_bytes(b"not an image")
    (folder / "light" / "2.png").write_bytes((folder / "light" / "3.png").read_bytes()[:60])
    site = embed(folder, tmp_path / "out", MeanColour())
    assert site.rows == 8
    assert [line.split(":")[0] for line in site.skipped] == ["dark/1.png", "light/2.png"]
    assert "damaged" in site.skipped[0]


def test_a_folder_without_readable_images_is_refused(tmp_path):
    (tmp_path / "oslo").mkdir()
    with pytest.raises(EmbeddingError, match="no image"):
        embed(tmp_path / "oslo", tmp_path / "out", MeanColour())
    (tmp_path / "oslo" / "a.png").write_bytes(b"?")
    with pytest.raises(EmbeddingError, match="damaged"):
        embed(tmp_path / "oslo", tmp_path / "out", MeanColour())


def test_a_loose_image_beside_folders_of_classes_is_refused(folder, tmp_path):
    Image.new("RGB", (5, 5)).save(folder / "loose.png")
    with pytest.raises(EmbeddingError, match=r"loose\.png"):
        embed(folder, tmp_path / "out", MeanColour())


def test_a_photograph_is_turned_upright_and_its_middle_is_taken(tmp_path):
    tall = Image.new("RGB", (8, 40), "red")
    tall.paste("blue", (0, 16, 8, 24))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    (tmp_path / "a").mkdir()
    tall.save(tmp_path / "a" / "1.jpg", exif=exif, quality=95)
    own = MeanColour()
    found = vectors_of(embed(tmp_path / "a", tmp_path / "out", own), own)[0]
    np.testing.assert_allclose(found, [0, 0, 1], atol=0.1)


def test_a_table_of_paths_keeps_its_other_columns(folder, tmp_path):
    lines = ["file,age,diagnosis", "dark/0.png,40,a", "light/1.png,50,b", "gone.png,60,a"]
    (folder / "list.csv").write_text("\n".join(lines))
    own = MeanColour()
    site = embed(folder / "list.csv", tmp_path / "out", own, image="file")
    table = pq.read_table(site.path)
    assert table.column_names == ["file", "age", "diagnosis", column_name(own)]
    assert site.skipped == ("gone.png: there is no such file",)
    assert table["diagnosis"].to_pylist() == ["a", "b"]


def test_an_npz_of_grey_images_needs_no_decoding(tmp_path):
    images = np.zeros((3, 6, 6), dtype=np.uint8)
    images[1] = 255
    np.savez(tmp_path / "x.npz", images=images, labels=np.array([0, 1, 0]))
    site = embed(tmp_path / "x.npz", tmp_path / "out", encoder("pixels"))
    table = pq.read_table(site.path)
    assert table["label"].to_pylist() == [0, 1, 0]
    assert vectors_of(site, encoder("pixels")).mean(1).tolist() == [0, 1, 0]


def test_texts_are_embedded_and_do_not_leave_with_the_vectors(tmp_path):
    table = pa.table({"note": ["a b", None, " ", "long text"], "label": ["x", "y", "x", "y"]})
    pq.write_table(table, tmp_path / "oslo.parquet")
    site = embed(tmp_path / "oslo.parquet", tmp_path / "out", Lengths(), text="note")
    found = pq.read_table(site.path)
    assert "note" not in found.column_names
    assert found["id"].to_pylist() == ["row 1", "row 4"]
    assert site.skipped == ("row 2: the text is missing", "row 3: the text is missing")


@pytest.mark.parametrize(
    ("own", "options", "word"),
    [
        (Lengths(), {"text": "remark"}, "remark"),
        (Lengths(), {}, "column"),
        (MeanColour(), {"text": "note"}, "images"),
        (MeanColour(), {}, "paths"),
    ],
)
def test_a_request_that_does_not_fit_the_table_is_explained(tmp_path, own, options, word):
    pq.write_table(pa.table({"note": ["a"]}), tmp_path / "t.parquet")
    with pytest.raises((EmbeddingError, TableError), match=word):
        embed(tmp_path / "t.parquet", tmp_path / "out", own, **options)


def test_a_file_of_the_user_is_not_replaced(folder, tmp_path):
    (tmp_path / "out").mkdir()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "out" / "oslo.parquet")
    with pytest.raises(EmbeddingError, match="in the way"):
        embed(folder, tmp_path / "out", MeanColour())


def test_an_unknown_encoder_and_a_missing_package_are_named(monkeypatch):
    with pytest.raises(ValueError, match="wordllama"):
        encoder("resnet99")
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers", None)
    with pytest.raises(ImportError, match=r"fedgmm\[text\]"):
        encoder("sentence-transformers:mini")


def test_wordllama_puts_similar_texts_close_together():
    pytest.importorskip("wordllama")
    own = encoder("wordllama")
    cat, kitten, tax = own.encode(["a small cat", "a little kitten", "income tax declaration"])
    assert cat @ kitten > cat @ tax + 0.2
    assert len(own.name.split()[-1]) == 64


# ---------------------------------------------------------------------- vectors in tables


def write_site(path, vectors, labels):
    table = pa.table({"v": vectors, "y": labels})
    pq.write_table(table, path)


def test_vectors_of_fixed_or_free_length_are_read_as_one_column_per_entry(tmp_path):
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(np.arange(6), pa.float16()), 2)
    free = pa.array([[1, 2, 3], None, [4, 5, 6]])
    pq.write_table(pa.table({"f": fixed, "g": free, "y": ["a", "b", "a"]}), tmp_path / "t.parquet")
    file = TableFile(tmp_path / "t.parquet")
    assert list(file.header) == ["f_0", "f_1", "g_0", "g_1", "g_2", "y"]
    file.read(file.header)
    assert np.asarray(file.columns["f_1"].numbers).tolist() == [1, 3, 5]
    np.testing.assert_array_equal(file.columns["g_2"].numbers, [3, np.nan, 6])


def test_vectors_of_different_lengths_are_refused(tmp_path):
    pq.write_table(pa.table({"g": [[1.0, 2.0], [3.0]]}), tmp_path / "t.parquet")
    with pytest.raises(TableError, match="lengths"):
        TableFile(tmp_path / "t.parquet")


def test_sites_with_another_encoder_are_refused(tmp_path):
    rng = np.random.default_rng(0)
    for site, name in (("a", "enc_1111"), ("b", "enc_1111"), ("c", "enc_2222")):
        vectors = pa.array(list(rng.normal(size=(30, 3))))
        table = pa.table({name: vectors, "y": rng.choice(["p", "q"], 30)})
        pq.write_table(table, tmp_path / f"{site}.parquet")
    with pytest.raises(TableError, match="enc_2222"):
        load_federation([tmp_path], TableOptions("y"))


# ---------------------------------------------------------------------- a file of somebody else


def naming(path, out, **place):
    """A copy of a file of vectors that names another source."""
    table = pq.read_table(path)
    facts = dict(table.schema.metadata)
    facts[b"fedgmm.source"] = json.dumps(json.loads(facts[b"fedgmm.source"]) | place).encode()
    pq.write_table(table.replace_schema_metadata(facts), out)
    return out


def test_images_are_shown_only_if_the_vectors_were_made_of_them(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = embed("oslo", "out", MeanColour())
    found = originals(made.path, 8)
    assert found.load("dark/0.png").shape == (3, 8, 8)
    os.utime(folder / "dark" / "1.png", ns=(1, 1))
    with pytest.raises(ValueError, match="changed"):
        originals(made.path, 8).load("dark/1.png")
    (tmp_path / "private" / "dark").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(tmp_path / "private" / "dark" / "0.png")
    hostile = naming(made.path, tmp_path / "x.parquet", source=str(tmp_path / "private"))
    with pytest.raises(ValueError, match="changed"):
        originals(hostile, 8).load("dark/0.png")


def test_texts_are_shown_only_if_the_vectors_were_made_of_them(tmp_path):
    (tmp_path / "a.csv").write_text("note,label\nfine,1\npoor,0\n")
    (tmp_path / "private.csv").write_text("note,label\nsecret,1\nhidden,0\n")
    made = embed(tmp_path / "a.csv", tmp_path / "out", Lengths(), text="note")
    assert originals(made.path, 8).load("row 1") == "fine"
    hostile = naming(
        made.path, tmp_path / "x.parquet", source=str(tmp_path / "private.csv"), text="note"
    )
    with pytest.raises(EmbeddingError, match="not what the vectors"):
        originals(hostile, 8)
    for wrong in ({"source": "/dev/zero"}, {"source": 5}, {"marks": None}):
        assert originals(naming(made.path, tmp_path / "y.parquet", **wrong), 8) is None


def test_no_program_is_started_for_an_image(tmp_path):
    """Pillow gives some kinds of files to other programs, such as PostScript to Ghostscript."""
    (tmp_path / "oslo" / "a").mkdir(parents=True)
    Image.new("RGB", (9, 9)).save(tmp_path / "oslo" / "a" / "0.png")
    Image.new("RGB", (9, 9)).save(tmp_path / "oslo" / "a" / "1.png", "EPS")
    Image.new("RGB", (9, 9)).save(tmp_path / "oslo" / "a" / "2.png", "JPEG")
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *given, **_: calls.append(given))
        made = embed(tmp_path / "oslo", tmp_path / "out", MeanColour())
    assert (made.rows, len(made.skipped), calls) == (2, 1, [])
