//! Parquet: one document per row, in a UTF-8 column.

use std::fs::File;
use std::ops::ControlFlow;
use std::path::Path;

use parquet::column::reader::ColumnReader;
use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader, SerializedFileReader};
use serde_json::Value;

use super::{EachPiece, Piece, WHOLE_RECORD, field};
use crate::error::DataError;

/// Rows read at once.
const ROWS: usize = 256;

/// Passes on a document per row; skips nulls. Reports the share of rows read since the last report.
pub(super) fn pieces(
    file: File,
    path: &Path,
    field: &str,
    each: EachPiece<'_>,
    read_share: &mut dyn FnMut(f64),
) -> Result<ControlFlow<()>, DataError> {
    let broken = |error: ParquetError| {
        let reason = format!("is not Parquet, or damaged: {}", error.to_string().replace('\n', " "));
        DataError::Refused { path: path.to_path_buf(), reason }
    };
    let reader = SerializedFileReader::new(file).map_err(broken)?;
    if field == WHOLE_RECORD {
        for row in reader.get_row_iter(None).map_err(broken)? {
            let text = row.map_err(broken)?.to_json_value().to_string();
            if each(Piece { text, ends_document: true })?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        read_share(1.0);
        return Ok(ControlFlow::Continue(()));
    }
    let columns = reader.metadata().file_metadata().schema_descr_ptr();
    let name = |at: usize| columns.column(at).path().string();
    let Some(column) = (0..columns.num_columns()).find(|at| name(*at) == field) else {
        let reason = field::lacks(field, (0..columns.num_columns()).map(name).collect());
        return Err(DataError::Refused { path: path.to_path_buf(), reason });
    };
    for group in 0..reader.num_row_groups() {
        let group = reader.get_row_group(group).map_err(broken)?;
        let ColumnReader::ByteArrayColumnReader(mut values) = group.get_column_reader(column).map_err(broken)? else {
            let kind = columns.column(column).physical_type();
            let others = (0..columns.num_columns()).map(name).filter(|other| other != field).collect();
            let reason = format!("the column '{field}' is {kind}, not text; {}", field::others(others));
            return Err(DataError::Refused { path: path.to_path_buf(), reason });
        };
        loop {
            let (mut levels, mut repeated, mut rows) = (Vec::new(), Vec::new(), Vec::new());
            let read = values.read_records(ROWS, Some(&mut levels), Some(&mut repeated), &mut rows);
            let (records, _, _) = read.map_err(broken)?;
            for row in rows {
                let text = String::from_utf8(row.data().to_vec()).map_err(|_| {
                    let reason = format!("the column '{field}' is not UTF-8 text");
                    DataError::Refused { path: path.to_path_buf(), reason }
                })?;
                if each(Piece { text, ends_document: true })?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
            if records == 0 {
                break;
            }
        }
        read_share(1.0 / reader.num_row_groups() as f64);
    }
    Ok(ControlFlow::Continue(()))
}

/// The names of a column's classes, in the order of their numbers, as Hugging Face's datasets store
/// them in the file's metadata; none for other columns and other files.
pub(crate) fn class_names(path: &Path, column: &str) -> Vec<String> {
    let names = || {
        let reader = SerializedFileReader::new(File::open(path).ok()?).ok()?;
        let metadata = reader.metadata().file_metadata().key_value_metadata()?;
        let stored = metadata.iter().find(|entry| entry.key == "huggingface")?.value.as_deref()?;
        let stored: Value = serde_json::from_str(stored).ok()?;
        let feature = &stored["info"]["features"][column];
        let names = feature["names"].as_array().filter(|_| feature["_type"] == "ClassLabel")?;
        names.iter().map(|name| name.as_str().map(str::to_string)).collect::<Option<Vec<_>>>()
    };
    names().unwrap_or_default()
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use parquet::data_type::{ByteArray, ByteArrayType, Int64Type};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::SerializedFileWriter;
    use parquet::schema::parser::parse_message_type;

    use super::*;

    /// Writes a column `text`.
    pub(in super::super) fn write(path: &Path, rows: &[Option<&str>]) {
        write_as(path, "OPTIONAL BINARY text (UTF8);", 1, rows);
    }

    /// Writes a column of strings in these nested fields; `level` counts the optional ones.
    pub(in super::super) fn write_as(path: &Path, fields: &str, level: i16, rows: &[Option<&str>]) {
        let schema = parse_message_type(&format!("message rows {{ {fields} }}")).expect("a schema");
        let file = File::create(path).expect("writable");
        let properties = Arc::new(WriterProperties::builder().build());
        let mut writer = SerializedFileWriter::new(file, Arc::new(schema), properties).expect("a writer");
        // Several row groups.
        for rows in rows.chunks(2) {
            let mut group = writer.next_row_group().expect("a group");
            let mut column = group.next_column().expect("no failure").expect("a column");
            let levels: Vec<i16> = rows.iter().map(|row| level * i16::from(row.is_some())).collect();
            let values: Vec<ByteArray> = rows.iter().flatten().map(|row| ByteArray::from(*row)).collect();
            column.typed::<ByteArrayType>().write_batch(&values, Some(&levels), None).expect("writable");
            column.close().expect("writable");
            group.close().expect("writable");
        }
        writer.close().expect("writable");
    }

    /// Writes a numeric column `id`.
    pub(in super::super) fn write_number(path: &Path) {
        let schema = parse_message_type("message rows { REQUIRED INT64 id; }").expect("a schema");
        let file = File::create(path).expect("writable");
        let properties = Arc::new(WriterProperties::builder().build());
        let mut writer = SerializedFileWriter::new(file, Arc::new(schema), properties).expect("a writer");
        let mut group = writer.next_row_group().expect("a group");
        let mut column = group.next_column().expect("no failure").expect("a column");
        column.typed::<Int64Type>().write_batch(&[7], None, None).expect("writable");
        column.close().expect("writable");
        group.close().expect("writable");
        writer.close().expect("writable");
    }
}
