//! Matrices as coloured cells: attention maps, confusion matrices, logit lenses.

use burn::tensor::activation::softmax;
use burn::tensor::{DType, Tensor};
use fireclay_kernels::Backend;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::{INK, Svg, text_width, undrawn};
use crate::failure::Failure;

const FONT: u32 = 13;
const TITLE: u32 = 18;
const MARGIN: u32 = 16;

/// A matrix to draw.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct HeatMap {
    /// The title.
    pub title: String,
    /// Names of the row and the column axis.
    pub axes: [String; 2],
    /// Row labels, top to bottom.
    pub rows: Vec<String>,
    /// Column labels, left to right.
    pub columns: Vec<String>,
    /// Cell shades in row-major order, 0 (white) to 1 (dark).
    pub shades: Vec<f64>,
    /// Cell cell_text in row-major order; empty for none.
    pub cell_text: Vec<String>,
}

/// White at 0, dark blue at 1; grey for NaN.
fn colour(shade: f64) -> RGBColor {
    if !shade.is_finite() {
        return RGBColor(190, 190, 190);
    }
    let towards = |dark: f64| (255.0 + (dark - 255.0) * shade.clamp(0.0, 1.0)).round() as u8;
    RGBColor(towards(8.0), towards(64.0), towards(129.0))
}

/// Makes white space in tokens visible.
fn visible(text: &str) -> String {
    text.chars()
        .map(|c| match c {
            ' ' => '\u{b7}',
            '\n' => '\u{21b5}',
            '\t' => '\u{2192}',
            c if c.is_control() => '\u{fffd}',
            c => c,
        })
        .collect()
}

/// Draws a matrix.
///
/// # Errors
/// If it has no cells, or the number of shades or cell_text is wrong.
pub fn heat_map(map: &HeatMap) -> Result<Svg, Failure> {
    let cells = map.rows.len() * map.columns.len();
    if cells == 0 || map.shades.len() != cells || !(map.cell_text.is_empty() || map.cell_text.len() == cells) {
        let (rows, columns) = (map.rows.len(), map.columns.len());
        let (shades, cell_text) = (map.shades.len(), map.cell_text.len());
        return Err(undrawn(format!(
            "{rows} rows and {columns} columns, but {shades} shades and {cell_text} cell_text"
        )));
    }
    let layout = Layout::of(map);
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, layout.size).into_drawing_area();
    draw(&area, map, &layout).map_err(undrawn)?;
    drop(area);
    Ok(Svg(svg))
}

/// The layout, in pixels.
///
/// ```text
///            title
///              column axis
///              column labels, upright
/// row   row    +--------------
/// axis  labels | cells
/// ```
struct Layout {
    cell: (u32, u32),
    origin: (u32, u32),
    size: (u32, u32),
}

impl Layout {
    fn of(map: &HeatMap) -> Self {
        let widest = |labels: &[String]| labels.iter().map(|text| text_width(text, FONT)).max().unwrap_or(0);
        let small = if map.rows.len().max(map.columns.len()) > 40 { 14 } else { 24 };
        let cell = (small.max(widest(&map.cell_text) + 8), small);
        let axis = |at: usize| if map.axes[at].is_empty() { 0 } else { FONT + 8 };
        let title = if map.title.is_empty() { 0 } else { TITLE + 12 };
        let origin = (MARGIN + axis(0) + widest(&map.rows) + 8, MARGIN + title + axis(1) + widest(&map.columns) + 8);
        let (width, height) = (cell.0 * map.columns.len() as u32, cell.1 * map.rows.len() as u32);
        let width = (origin.0 + width).max(text_width(&map.title, TITLE)) + MARGIN;
        Self { cell, origin, size: (width, origin.1 + height + MARGIN) }
    }

    /// The upper left corner of a cell.
    fn at(&self, row: usize, column: usize) -> (i32, i32) {
        let x = self.origin.0 + column as u32 * self.cell.0;
        let y = self.origin.1 + row as u32 * self.cell.1;
        (x as i32, y as i32)
    }
}

fn draw(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    map: &HeatMap,
    layout: &Layout,
) -> Result<(), Box<dyn std::error::Error>> {
    area.fill(&WHITE)?;
    let style = |size: u32, colour: RGBColor, horizontal: HPos, vertical: VPos| {
        ("sans-serif", size).into_font().color(&colour).pos(Pos::new(horizontal, vertical))
    };
    let margin = MARGIN as i32;
    let (width, height) = (layout.cell.0 as i32, layout.cell.1 as i32);
    if !map.title.is_empty() {
        area.draw_text(&map.title, &style(TITLE, INK, HPos::Left, VPos::Top), (margin, margin))?;
    }
    let (left, top) = layout.at(0, 0);
    let (right, bottom) = layout.at(map.rows.len(), map.columns.len());
    if !map.axes[0].is_empty() {
        let upright = style(FONT, INK, HPos::Center, VPos::Top).transform(FontTransform::Rotate270);
        area.draw_text(&map.axes[0], &upright, (margin, (top + bottom) / 2))?;
    }
    if !map.axes[1].is_empty() {
        let title = if map.title.is_empty() { 0 } else { TITLE as i32 + 12 };
        area.draw_text(&map.axes[1], &style(FONT, INK, HPos::Center, VPos::Top), ((left + right) / 2, margin + title))?;
    }
    for (row, label) in map.rows.iter().enumerate() {
        let (x, y) = layout.at(row, 0);
        area.draw_text(label, &style(FONT, INK, HPos::Right, VPos::Center), (x - 6, y + height / 2))?;
    }
    for (column, label) in map.columns.iter().enumerate() {
        let (x, y) = layout.at(0, column);
        let upright = style(FONT, INK, HPos::Left, VPos::Center).transform(FontTransform::Rotate270);
        area.draw_text(label, &upright, (x + width / 2, y - 6))?;
    }
    for (at, shade) in map.shades.iter().enumerate() {
        let (x, y) = layout.at(at / map.columns.len(), at % map.columns.len());
        let corners = [(x, y), (x + width, y + height)];
        area.draw(&Rectangle::new(corners, colour(*shade).filled()))?;
        if let Some(text) = map.cell_text.get(at).filter(|text| !text.is_empty()) {
            let ink = if *shade > 0.5 { WHITE } else { INK };
            area.draw_text(text, &style(FONT, ink, HPos::Center, VPos::Center), (x + width / 2, y + height / 2))?;
        }
    }
    area.draw(&Rectangle::new([(left, top), (right, bottom)], RGBColor(200, 200, 200)))?;
    area.present()?;
    Ok(())
}

/// Plots an attention matrix: `weights` `[tokens, tokens]` in row-major order; rows sum to one.
///
/// # Errors
/// If the size of `weights` is wrong.
pub fn attention_map(title: &str, tokens: &[String], weights: &[f32]) -> Result<Svg, Failure> {
    let labels: Vec<String> = tokens.iter().map(|token| visible(token)).collect();
    heat_map(&HeatMap {
        title: title.into(),
        axes: ["from (query)".into(), "to (key)".into()],
        rows: labels.clone(),
        columns: labels,
        shades: weights.iter().map(|weight| f64::from(*weight)).collect(),
        cell_text: Vec::new(),
    })
}

/// Plots several heads as small maps, `per_row` side by side, each with a title; weights as in
/// [`attention_map`].
///
/// # Errors
/// If there are no heads, or their weights are not square or differ in size.
pub fn attention_maps(title: &str, per_row: usize, heads: &[(String, Vec<f32>)]) -> Result<Svg, Failure> {
    const MAP: u32 = 170;
    const GAP: u32 = 14;
    let per_row = per_row.max(1);
    let tokens = heads.first().map_or(0, |(_, weights)| weights.len().isqrt());
    if tokens == 0 || heads.iter().any(|(_, weights)| weights.len() != tokens * tokens) {
        return Err(undrawn("heads need weights for the same number of tokens each, at least one"));
    }
    let columns = heads.len().min(per_row) as u32;
    let rows = heads.len().div_ceil(per_row) as u32;
    let top = MARGIN + TITLE + 12;
    let size = (
        (2 * MARGIN + columns * (MAP + GAP)).max(text_width(title, TITLE) + 2 * MARGIN),
        top + rows * (MAP + GAP + FONT + 6) + MARGIN,
    );
    let mut svg = String::new();
    let area = SVGBackend::with_string(&mut svg, size).into_drawing_area();
    let drawn = || -> Result<(), Box<dyn std::error::Error>> {
        area.fill(&WHITE)?;
        area.draw_text(title, &("sans-serif", TITLE).into_font().color(&INK), (MARGIN as i32, MARGIN as i32))?;
        for (at, (name, weights)) in heads.iter().enumerate() {
            let left = (MARGIN + (at % per_row) as u32 * (MAP + GAP)) as i32;
            let upper = (top + (at / per_row) as u32 * (MAP + GAP + FONT + 6)) as i32;
            area.draw_text(name, &("sans-serif", FONT).into_font().color(&INK), (left, upper))?;
            let upper = upper + FONT as i32 + 4;
            // Round the cell borders, so that no gaps show.
            let edge = |index: usize| (index * MAP as usize / tokens) as i32;
            for (cell, weight) in weights.iter().enumerate().filter(|(_, weight)| **weight > 1e-3) {
                let (row, column) = (cell / tokens, cell % tokens);
                let corners =
                    [(left + edge(column), upper + edge(row)), (left + edge(column + 1), upper + edge(row + 1))];
                area.draw(&Rectangle::new(corners, colour(f64::from(*weight)).filled()))?;
            }
            let corners = [(left, upper), (left + MAP as i32, upper + MAP as i32)];
            area.draw(&Rectangle::new(corners, RGBColor(200, 200, 200)))?;
        }
        area.present()?;
        Ok(())
    };
    drawn().map_err(undrawn)?;
    drop(area);
    Ok(Svg(svg))
}

/// Plots a logit lens: `streams` are the logits `[1, seq_length, vocab_size]` of each residual
/// stream in order ([`logit_lens`](fireclay_model::Transformer::logit_lens)). A cell shows the top
/// next token, shaded by its probability. The last stream is the top row.
///
/// # Errors
/// If the device fails, the logits do not match `tokens`, or `name` fails.
pub fn logit_lens<B: Backend, E: Into<Failure>>(
    title: &str,
    tokens: &[String],
    streams: impl IntoIterator<Item = Tensor<B, 3>>,
    name: impl Fn(u32) -> Result<String, E>,
) -> Result<HeatMap, Failure> {
    let (mut rows, mut shades, mut cell_text) = (Vec::new(), Vec::new(), Vec::new());
    for (block, logits) in streams.into_iter().enumerate() {
        if logits.dims()[..2] != [1, tokens.len()] {
            return Err(undrawn(format!("logits {:?} are not for {} tokens", logits.dims(), tokens.len())));
        }
        let (probability, top) = softmax(logits.cast(DType::F32), 2).max_dim_with_indices(2);
        let failed = |error| Failure::new(format!("the device failed: {error:?}"));
        let probability = probability.try_into_data().map_err(failed)?;
        let top = top.try_into_data().map_err(failed)?;
        let said = top.iter::<i64>().map(|token| name(token as u32).map_err(Into::into));
        let said = said.collect::<Result<Vec<String>, Failure>>()?;
        // Rows go from bottom to top, as in diagrams of the model.
        rows.insert(0, if block == 0 { "embedding".to_string() } else { format!("block {}", block - 1) });
        shades.splice(0..0, probability.iter::<f64>());
        cell_text.splice(0..0, said.iter().map(|text| visible(text)));
    }
    Ok(HeatMap {
        title: title.into(),
        axes: [String::new(), "read so far".into()],
        rows,
        columns: tokens.iter().map(|token| visible(token)).collect(),
        shades,
        cell_text,
    })
}

/// Plots a confusion matrix: `counts` in row-major order, with a row per expected and a column per
/// predicted label. A cell is shaded by its share of the row.
///
/// # Errors
/// If the size of `counts` is wrong.
pub fn confusion_matrix(title: &str, labels: &[String], counts: &[usize]) -> Result<Svg, Failure> {
    let width = labels.len().max(1);
    let total = |row: usize| counts.iter().skip(row * width).take(width).sum::<usize>().max(1);
    let shade = |(at, count): (usize, &usize)| *count as f64 / total(at / width) as f64;
    let text = |count: &usize| if *count == 0 { String::new() } else { count.to_string() };
    heat_map(&HeatMap {
        title: title.into(),
        axes: ["expected".into(), "predicted".into()],
        rows: labels.to_vec(),
        columns: labels.to_vec(),
        shades: counts.iter().enumerate().map(shade).collect(),
        cell_text: counts.iter().map(text).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(labels: &[&str]) -> Vec<String> {
        labels.iter().map(|text| text.to_string()).collect()
    }

    #[test]
    fn a_cell_is_as_dark_as_its_weight() {
        let svg = attention_map("head 0", &strings(&["a", " b\n"]), &[1.0, 0.0, 0.5, f32::NAN]).expect("drawn");
        let svg = svg.as_str();
        for shade in ["#084081", "#FFFFFF", "#84A0C0", "#BEBEBE"] {
            assert!(svg.contains(shade), "{shade} in {svg}");
        }
        assert!(svg.contains("\u{b7}b\u{21b5}"), "spaces and line ends are seen: {svg}");
    }

    #[test]
    fn confusions_are_counted_and_shaded_by_row() {
        let svg = confusion_matrix("", &strings(&["alarm", "lamp <on>"]), &[30, 10, 0, 7]).expect("drawn").to_string();
        for text in ["alarm", "lamp &lt;on&gt;", "30", "10", "7"] {
            assert!(svg.contains(text), "{text} in {svg}");
        }
        // A quarter of the row, and all of it.
        assert!(svg.contains("#C1CFE0") && svg.contains("#084081"), "{svg}");
    }

    #[test]
    fn matrices_that_are_none_are_refused() {
        assert!(attention_map("", &strings(&["a", "b"]), &[1.0; 3]).is_err());
        assert!(confusion_matrix("", &[], &[]).is_err());
        assert!(attention_maps("", 4, &[]).is_err());
        assert!(attention_maps("", 4, &[("0".into(), vec![1.0; 4]), ("1".into(), vec![1.0; 9])]).is_err());
        assert!(attention_maps("", 4, &[("0".into(), vec![0.5; 4])]).is_ok());
    }
}
