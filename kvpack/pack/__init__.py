"""The pack file: preamble, manifest, index, codecs, writer and reader (spec/kvpack-v1.md)."""
