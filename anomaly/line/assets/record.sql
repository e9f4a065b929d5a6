-- The tables of a record. Every statement may be run again.
CREATE TABLE IF NOT EXISTS parts (
    id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL, line TEXT NOT NULL,
    model_id TEXT NOT NULL AS (json_extract (line, '$.model_id')) STORED,
    time TEXT NOT NULL AS (json_extract (line, '$.time')) STORED,
    sha256 TEXT NOT NULL AS (json_extract (line, '$.image_sha256')) STORED,
    status TEXT NOT NULL AS (json_extract (line, '$.status')) STORED,
    verdict TEXT NOT NULL AS (json_extract (line, '$.verdict')) STORED,
    score REAL AS (json_extract (line, '$.image_score')) STORED CHECK (ABS (score) < 9e999)) STRICT;
CREATE INDEX IF NOT EXISTS parts_by_time ON parts (time, model, status, verdict);
CREATE INDEX IF NOT EXISTS parts_by_verdict ON parts (verdict, id);
CREATE INDEX IF NOT EXISTS parts_by_image ON parts (sha256, id);
CREATE INDEX IF NOT EXISTS parts_by_model ON parts (model, id);
CREATE INDEX IF NOT EXISTS parts_by_version ON parts (model_id, id);
CREATE TABLE IF NOT EXISTS pictures (
    part INTEGER PRIMARY KEY REFERENCES parts (id), asked INTEGER NOT NULL, bytes INTEGER NOT NULL,
    file BLOB NOT NULL, heatmap BLOB) STRICT;
CREATE INDEX IF NOT EXISTS pictures_by_age ON pictures (asked, part, bytes);
CREATE TABLE IF NOT EXISTS feedback (
    id INTEGER PRIMARY KEY AUTOINCREMENT, part INTEGER REFERENCES parts (id),
    sha256 TEXT NOT NULL, who TEXT NOT NULL, verdict TEXT NOT NULL, defect_type TEXT NOT NULL,
    note TEXT NOT NULL, time TEXT NOT NULL) STRICT;
CREATE INDEX IF NOT EXISTS feedback_by_image ON feedback (sha256, id);
CREATE TRIGGER IF NOT EXISTS feedback_stays BEFORE UPDATE ON feedback
    BEGIN SELECT RAISE (ABORT, 'feedback is only added to'); END;
CREATE TRIGGER IF NOT EXISTS feedback_is_kept BEFORE DELETE ON feedback
    BEGIN SELECT RAISE (ABORT, 'feedback is only added to'); END;
CREATE TABLE IF NOT EXISTS promises (
    model_id TEXT PRIMARY KEY, line TEXT NOT NULL CHECK (json_valid (line))) STRICT;
CREATE TABLE IF NOT EXISTS outboxes (
    sink TEXT PRIMARY KEY, sent INTEGER NOT NULL, refused INTEGER NOT NULL) STRICT;
