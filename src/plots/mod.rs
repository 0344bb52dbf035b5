//! SVG plots: curves, attention maps, confusion matrices; for the command line, reports and
//! notebooks.
//!
//! ```
//! use fireclay::plots::{Curve, curves};
//!
//! let loss = Curve::new("training", [(0.0, 4.2), (100.0, 2.5), (200.0, 1.9)]);
//! let picture = curves("Loss", ["step", "nats per token"], &[loss])?;
//! assert!(picture.as_str().starts_with("<svg"));
//! # Ok::<(), fireclay::Failure>(())
//! ```

mod curves;
mod heat_map;
mod roofline;

use std::fmt::{self, Display, Formatter};
use std::path::Path;

use plotters::style::RGBColor;

pub use curves::{Curve, curves};
pub use heat_map::{HeatMap, attention_map, attention_maps, confusion_matrix, heat_map, logit_lens};

pub use roofline::{Dot, Roof, roofline};

use crate::failure::Failure;
use crate::run_folder::write_atomic;

/// Colour of text and axes.
const INK: RGBColor = RGBColor(45, 45, 45);

/// An SVG plot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Svg(String);

impl Svg {
    /// The SVG source.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Writes it to a file.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn save(&self, path: &Path) -> Result<(), Failure> {
        write_atomic(path, self.0.as_bytes())
    }

    /// Displays it in a notebook: evcxr calls this for a cell's last value.
    pub fn evcxr_display(&self) {
        println!("EVCXR_BEGIN_CONTENT image/svg+xml\n{}\nEVCXR_END_CONTENT", self.0);
    }
}

impl Display for Svg {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Why a plot could not be drawn.
fn undrawn(error: impl Display) -> Failure {
    Failure::new(format!("a picture could not be drawn: {error}"))
}

/// Approximate width of text in pixels: sans-serif letters are half as wide as high.
fn text_width(text: &str, font_size: u32) -> u32 {
    (text.chars().count() as u32 * font_size * 6).div_ceil(10)
}
