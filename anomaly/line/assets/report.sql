-- What `anomaly report` asks of a record, in tables and views of the connection alone.
CREATE TEMP TABLE words AS SELECT sha256, verdict, defect_type FROM {judged};
CREATE INDEX temp.words_by_image ON words (sha256);
-- The parts of the period (age 0) and of the one before (age 1) with the last word on each.
CREATE TEMP TABLE seen AS SELECT parts.id, time < '{begin}' AS age, model, model_id, time, score,
    CASE WHEN status <> 'ok' THEN status WHEN parts.verdict = '' THEN 'no verdict'
        ELSE parts.verdict END AS outcome,
    COALESCE (words.verdict, '') AS judged,
    COALESCE (words.defect_type, '') AS kind,
    COALESCE (json_extract (line, '$.reason'), '') = '' AS by_score, json_extract (line, '$.review_threshold') AS review,
    json_extract (line, '$.threshold') AS reject, strftime ('{bucket}', time, 'localtime') AS bucket
    FROM main.parts LEFT JOIN words ON words.sha256 = parts.sha256
    WHERE time >= '{earliest}' AND time < '{end}' AND bucket IS NOT NULL ORDER BY parts.id;
CREATE TEMP VIEW counted AS
    SELECT 1 AS place, 'all parts' AS what, age, COUNT (*) AS parts FROM seen GROUP BY age
    UNION ALL SELECT * FROM (VALUES (2, 'good', 0, 0), (3, 'review', 0, 0), (4, 'reject', 0, 0))
    UNION ALL SELECT CASE outcome WHEN 'good' THEN 2 WHEN 'review' THEN 3 WHEN 'reject' THEN 4
        ELSE 5 END, outcome, age, COUNT (*) FROM seen GROUP BY outcome, age
    UNION ALL SELECT 7, 'false rejects', age, SUM (outcome = 'reject' AND judged = 'good')
        FROM seen GROUP BY age
    UNION ALL SELECT 8, 'escapes', age, SUM (outcome = 'good' AND judged = 'defect')
        FROM seen GROUP BY age;
CREATE TEMP VIEW yields AS
    WITH totals AS (SELECT 1.0 * SUM (age = 0) AS now, NULLIF (1.0 * SUM (age), 0) AS before FROM seen),
    pairs AS (SELECT what, SUM ((age = 0) * parts) AS now, SUM (age * parts) AS before
        FROM counted GROUP BY place, what ORDER BY place, what)
    SELECT what AS outcome, pairs.now AS parts, pairs.now / totals.now AS share, pairs.before AS before,
        pairs.before / totals.before AS "share before",
        CASE WHEN pairs.now / totals.now > pairs.before / totals.before THEN 'up '
            WHEN pairs.now / totals.now < pairs.before / totals.before THEN 'down ' END
        || PRINTF ('%.2f points', 100 * ABS (pairs.now / totals.now - pairs.before / totals.before))
        AS change FROM pairs, totals;
CREATE TEMP VIEW judgements AS SELECT outcome AS "the model says",
    SUM (judged = 'good') AS "people say good", SUM (judged = 'defect') AS "people say defect",
    SUM (judged = '') AS "not judged" FROM seen
    WHERE age = 0 AND outcome IN ('good', 'review', 'reject')
    GROUP BY outcome ORDER BY outcome = 'reject', outcome = 'review';
CREATE TEMP VIEW versions AS SELECT model || ' ' || model_id AS "model and version",
    strftime ('%Y-%m-%d %H:%M', MIN (time), 'localtime') AS "first part", COUNT (*) AS parts,
    AVG (outcome = 'good') AS good, AVG (outcome = 'review') AS review,
    AVG (outcome = 'reject') AS reject, SUM (outcome = 'reject' AND judged = 'good') AS "false rejects",
    SUM (outcome = 'good' AND judged = 'defect') AS escapes,
    SUM (outcome = 'good' AND judged = 'good' OR outcome = 'reject' AND judged = 'defect') AS "people agree",
    SUM (outcome IN ('good', 'reject') AND judged <> '') AS judged
    FROM seen WHERE age = 0 GROUP BY model, model_id ORDER BY model, MIN (id);
CREATE TEMP VIEW promised AS SELECT model, model_id, COUNT (*),
    SUM (outcome <> 'good'), SUM (outcome = 'reject' AND judged = 'good'),
    SUM (judged = 'defect'), SUM (outcome = 'good' AND judged = 'defect') FROM seen
    WHERE age = 0 AND by_score AND outcome IN ('good', 'review', 'reject')
    GROUP BY model, model_id ORDER BY model, MIN (id);
CREATE TEMP VIEW kinds AS SELECT kind AS "kind of defect",
    SUM (outcome = 'reject') AS reject, SUM (outcome = 'review') AS review,
    SUM (outcome = 'good') AS good FROM seen WHERE age = 0 AND kind <> '' GROUP BY 1 ORDER BY 2 + 3 DESC, 1;
CREATE TEMP VIEW times AS SELECT bucket AS time, COUNT (*) AS parts, SUM (outcome = 'good') AS good,
    SUM (outcome = 'review') AS review, SUM (outcome = 'reject') AS reject FROM seen
    WHERE age = 0 GROUP BY 1 ORDER BY 1;
-- In the order of the parts; without those that people have called defects.
CREATE TEMP VIEW scores AS SELECT model_id, score FROM seen
    WHERE age = 0 AND by_score AND score IS NOT NULL AND judged <> 'defect' ORDER BY id;
-- The pictures that matter: escapes, rejects that people overruled, what lies at a threshold.
CREATE TEMP VIEW notable AS
    WITH ranked AS (SELECT id, judged,
        CASE WHEN outcome = 'good' AND judged = 'defect' THEN 1
            WHEN outcome = 'reject' AND judged = 'good' THEN 2 ELSE 3 END AS why,
        CASE WHEN outcome = 'reject' AND judged = 'good' THEN -score / reject
            WHEN outcome = 'good' AND judged = 'defect' THEN score / reject
            ELSE MIN (ABS (score - reject), ABS (score - review)) / reject END AS rank
        FROM seen WHERE age = 0 AND reject > 0 AND id IN (SELECT part FROM main.pictures)),
    placed AS (SELECT *, ROW_NUMBER () OVER (PARTITION BY why ORDER BY rank, id) AS place FROM ranked)
    SELECT why, placed.id, judged, model, strftime ('%Y-%m-%d %H:%M:%S', time, 'localtime'), line,
        heatmap FROM placed
    JOIN main.parts ON parts.id = placed.id JOIN main.pictures ON pictures.part = placed.id
    WHERE why = 3 OR place <= 4 ORDER BY why, place LIMIT 10;
