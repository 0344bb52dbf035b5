//! The dashboard's layout: from the state of a run to the cells of a terminal of any size.
//!
//! ```text
//! title  about                                     step 300 of 2,500
//! ██████████░░░░░░░░░░░░░░░░  12%   elapsed 10s   left 1m 12s
//! ┌ loss ──────────────────────────────┐┌ now ─────────────────────┐
//! │ both curves over one axis of steps ││ figures                  │
//! └────────────────────────────────────┘└──────────────────────────┘
//! ┌ sample at step 250 ────────────────────────────────────────────┐
//! └────────────────────────────────────────────────────────────────┘
//! warnings, keys
//! ```

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Axis, Block, Chart, Dataset, Gauge, GraphType, Paragraph, Wrap};

use super::state::State;
use crate::progress::duration;

const TRAIN: Color = Color::Yellow;
const VALID: Color = Color::Cyan;
const DIM: Style = Style::new().fg(Color::DarkGray);
/// Width of the figures, in columns.
const FIGURES: u16 = 38;
/// Smaller terminals get a few lines only.
const SMALLEST: (u16, u16) = (56, 16);

/// Draws everything.
pub(super) fn draw(frame: &mut Frame<'_>, state: &State) {
    let area = frame.area();
    if area.width < SMALLEST.0 || area.height < SMALLEST.1 {
        let lines: Vec<Line<'_>> = std::iter::once(progress_line(state)).chain(figures(state)).collect();
        frame.render_widget(Paragraph::new(lines), area);
        return;
    }
    // As many rows as the text probably needs, at most half of the height.
    let text = (area.height / 3).clamp(4, 12);
    let notes = state.warnings.len() as u16 + 1;
    let rows = [Constraint::Length(2), Constraint::Min(8), Constraint::Length(text), Constraint::Length(notes)];
    let [head, middle, writing, foot] = Layout::vertical(rows).areas(area);
    draw_head(frame, head, state);
    let [curves, now] = Layout::horizontal([Constraint::Min(20), Constraint::Length(FIGURES)]).areas(middle);
    draw_curves(frame, curves, state);
    frame.render_widget(Paragraph::new(figures(state)).block(Block::bordered().title(" now ")), now);
    draw_writing(frame, writing, state);
    draw_foot(frame, foot, state);
}

fn draw_head(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let [first, second] = Layout::vertical([Constraint::Length(1), Constraint::Length(1)]).areas(area);
    let about = &state.about;
    let at = step_of(state);
    let [left, right] =
        Layout::horizontal([Constraint::Min(0), Constraint::Length(at.chars().count() as u16)]).areas(first);
    let title = Span::styled(about.title.clone(), Style::new().add_modifier(Modifier::BOLD));
    frame.render_widget(Line::from(vec![title, Span::styled(format!("  {}", about.what), DIM)]), left);
    frame.render_widget(Line::from(at), right);
    let times = times(state);
    let width = times.chars().count() as u16 + 2;
    let [bar, clock] = Layout::horizontal([Constraint::Min(10), Constraint::Length(width)]).areas(second);
    let share = if about.steps == 0 { 0.0 } else { (state.step as f64 / about.steps as f64).min(1.0) };
    let gauge = Gauge::default().ratio(share).use_unicode(true).label(format!("{:.0}%", 100.0 * share));
    frame.render_widget(gauge.gauge_style(Style::new().fg(Color::Green)), bar);
    frame.render_widget(Line::from(format!("  {times}")), clock);
}

fn step_of(state: &State) -> String {
    match state.about.steps {
        0 => format!("step {}", grouped(state.step)),
        steps => format!("step {} of {}", grouped(state.step), grouped(steps)),
    }
}

fn times(state: &State) -> String {
    let elapsed = duration(state.elapsed().as_secs_f64());
    match state.left() {
        Some(left) => format!("{elapsed} elapsed, {} left", duration(left)),
        None => format!("{elapsed} elapsed"),
    }
}

fn progress_line(state: &State) -> Line<'static> {
    Line::from(format!("{}  {}  {}", state.about.title, step_of(state), times(state)))
}

/// The least and the largest value.
fn extent(values: impl Iterator<Item = f64> + Clone) -> Option<[f64; 2]> {
    Some([values.clone().reduce(f64::min)?, values.reduce(f64::max)?])
}

/// Steps and losses of the axes. A linear scale takes the losses of the last nine tenths of the
/// steps, so that the first ones do not flatten all that follow; a logarithmic one takes all.
fn axes<'a>(points: impl Iterator<Item = &'a (f64, f64)> + Clone, log: bool) -> Option<[[f64; 2]; 2]> {
    let [left, right] = extent(points.clone().map(|(step, _)| *step))?;
    let from = if log { left } else { left + 0.1 * (right - left) };
    let [low, high] = extent(points.filter(|(step, _)| *step >= from).map(|(_, loss)| *loss))?;
    let margin = ((high - low) * 0.05).max(1e-3);
    Some([[left, right.max(left + 1.0)], [low - margin, high + margin]])
}

/// Both losses over the steps. Losses beyond the axes are not shown.
fn draw_curves(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let scaled = |points: &[(f64, f64)]| -> Vec<(f64, f64)> {
        let finite = points.iter().filter(|(_, y)| y.is_finite() && (!state.log || *y > 0.0));
        finite.map(|(x, y)| (*x, if state.log { y.ln() } else { *y })).collect()
    };
    let (train, valid) = (scaled(state.train.points()), scaled(state.valid.points()));
    let title = if state.log { " loss, nats, log scale " } else { " loss, nats " };
    let block = Block::bordered().title(Line::from(vec![
        Span::raw(title),
        Span::styled("training ", Style::new().fg(TRAIN)),
        Span::styled("validation ", Style::new().fg(VALID)),
    ]));
    let Some([x, y]) = axes(train.iter().chain(&valid), state.log) else {
        let text = Paragraph::new("the first step compiles kernels and takes longest").style(DIM);
        frame.render_widget(text.block(block), area);
        return;
    };
    let unscaled = |y: f64| if state.log { y.exp() } else { y };
    let labels = [y[0], (y[0] + y[1]) / 2.0, y[1]].map(|y| format!("{:.3}", unscaled(y)));
    let steps = [x[0], x[1]].map(|x| grouped(x.round() as u64));
    let dataset = |points, colour| {
        let style = Style::new().fg(colour);
        Dataset::default().data(points).marker(Marker::Braille).graph_type(GraphType::Line).style(style)
    };
    let chart = Chart::new(vec![dataset(&train, TRAIN), dataset(&valid, VALID)])
        .block(block)
        .x_axis(Axis::default().bounds(x).labels(steps).style(DIM))
        .y_axis(Axis::default().bounds(y).labels(labels).style(DIM));
    frame.render_widget(chart, area);
}

/// The figures, one line each.
fn figures(state: &State) -> Vec<Line<'static>> {
    let mut lines = Vec::new();
    let mut add = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            lines.push(Line::from(vec![Span::styled(format!("{name:<14}"), DIM), Span::raw(value)]));
        }
    };
    add("training", state.loss.map(|loss| format!("{loss:.4}")));
    add("validation", state.valid_loss.map(|loss| format!("{loss:.4}")));
    add("best", state.best.map(|(step, best)| format!("{:.4} at step {}", best.loss, grouped(step))));
    if let Some(scores) = state.scores {
        add("intents", Some(format!("{:.2}%", scores.intent_accuracy)));
        add("slots, F1", Some(format!("{:.2}", scores.slot_f1)));
        add("sentences", Some(format!("{:.2}%", scores.sentence_accuracy)));
    }
    if let Some(classes) = state.classes {
        add("accuracy", Some(format!("{:.2}%", classes.accuracy)));
        add("macro F1", Some(format!("{:.2}", classes.macro_f1)));
    }
    add("tokens/s", state.tokens_per_second.map(|speed| grouped(speed as u64)));
    add("FLOPs used", state.utilization().map(|share| format!("{:.1}% of the peak", 100.0 * share)));
    add("learning rate", state.learning_rate.map(|rate| format!("{rate:.2e}")));
    add("gradient norm", state.gradient_norm.map(|norm| format!("{norm:.3}")));
    if let Some(memory) = state.memory {
        let device = memory.device.map(|device| format!("{} of {}", bytes(device.in_use), bytes(device.reserved)));
        add("device memory", device);
        add("host memory", memory.host.map(bytes));
    }
    lines
}

/// The sample, or the confusions.
fn draw_writing(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let (title, text) = match (&state.sample, state.confusions.as_slice()) {
        (Some((step, text)), _) => (format!(" sample at step {} ", grouped(*step)), text.trim().to_string()),
        (None, []) => (" sample ".to_string(), "after the first validation".to_string()),
        (None, confusions) => {
            let line = |(expected, predicted, count): &(String, String, usize)| {
                format!("{count:>4} x {expected} predicted as {predicted}")
            };
            let lines: Vec<String> = confusions.iter().map(line).collect();
            (" most frequent confusions ".to_string(), lines.join("\n"))
        }
    };
    // Removes control characters.
    let clean: String = text.chars().map(|c| if c.is_control() && c != '\n' { ' ' } else { c }).collect();
    let style = if state.sample.is_none() && state.confusions.is_empty() { DIM } else { Style::new() };
    let paragraph = Paragraph::new(clean).style(style).wrap(Wrap { trim: false });
    frame.render_widget(paragraph.block(Block::bordered().title(title)), area);
}

fn draw_foot(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let warning = |text: &String| Line::styled(text.clone(), Style::new().fg(Color::Red));
    let mut lines: Vec<Line<'_>> = state.warnings.iter().map(warning).collect();
    lines.push(match state.stopping {
        true => Line::styled(
            "stopping and saving after this step; press Ctrl-C again to stop without saving",
            Style::new().fg(Color::Red),
        ),
        false => Line::styled("q stop and save   l log scale", DIM),
    });
    frame.render_widget(Paragraph::new(lines), area);
}

/// A number with thousands separators.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut grouped = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// A size in bytes, in a suitable unit.
fn bytes(count: u64) -> String {
    match count {
        0..1_000_000_000 => format!("{:.0} MB", count as f64 / 1e6),
        _ => format!("{:.2} GB", count as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use super::*;
    use crate::tasks::validation::Validation;
    use crate::training::events::{Event, MemoryUse};
    use crate::training::views::dashboard::state::About;

    fn screen(state: &State, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("in memory");
        terminal.draw(|frame| draw(frame, state)).expect("in memory");
        let buffer = terminal.backend().buffer();
        let cell = |at: (u16, u16)| buffer[at].symbol().to_string();
        (0..height).map(|y| (0..width).map(|x| cell((x, y))).collect::<String>() + "\n").collect()
    }

    fn state() -> State {
        let about =
            About { title: "stories".into(), what: "0.8M parameters".into(), steps: 2500, flops: Some((1e9, 1e15)) };
        let mut state = State::new(about, 0);
        for step in 1..=1200 {
            state.note(&Event::Trained {
                step,
                loss: 1.0 + 4.0 / step as f64,
                perplexity: None,
                learning_rate: 1e-3,
                gradient_norm: 0.5,
                tokens_per_second: 123_456.0,
                rewards: None,
                experts: None,
                memory: Some(MemoryUse { device: None, host: Some(512_000_000) }),
            });
        }
        state.note(&Event::Validated { step: 1000, validation: Validation::of_loss(1.25), perplexity: None });
        state.note(&Event::Sampled { step: 1000, text: "Once there was\na potter.\u{1b}[2J".into() });
        state.note(&Event::Warned { step: 1100, text: "the gradient norm is 30".into() });
        state
    }

    #[test]
    fn the_first_losses_do_not_set_the_scale() {
        let losses: Vec<(f64, f64)> = (1..=1000).map(|step| (f64::from(step), 1.0 + 4.0 / f64::from(step))).collect();
        let [steps, [low, high]] = axes(losses.iter(), false).expect("losses");
        assert_eq!(steps, [1.0, 1000.0]);
        assert!(low < 1.004 && 1.039 < high && high < 1.05, "{low} {high}");
        let shown = screen(&state(), 80, 24);
        assert!(shown.contains("1.262") && !shown.contains("5."), "{shown}");
    }

    #[test]
    fn everything_is_on_a_screen_of_either_size() {
        for (width, height) in [(80, 24), (200, 60)] {
            let shown = screen(&state(), width, height);
            for text in [
                "stories",
                "step 1,200 of 2,500",
                "48%",
                "left",
                "1.2500 at step 1,000",
                "123,456",
                "12.3% of the peak",
                "1.00e-3",
                "0.500",
                "512 MB",
                "sample at step 1,000",
                "Once there was",
                "a potter.",
                "step 1100: the gradient norm is 30",
                "q stop and save",
                "training",
                "validation",
            ] {
                assert!(shown.contains(text), "{text} is not on {width}x{height}:\n{shown}");
            }
            assert!(!shown.contains('\u{1b}'));
        }
    }

    #[test]
    fn a_tiny_screen_has_the_figures_and_nothing_panics_on_any() {
        let shown = screen(&state(), 40, 8);
        assert!(shown.contains("step 1,200 of 2,500") && shown.contains("123,456"), "{shown}");
        let empty = State::new(About::titled("x"), 0);
        for (width, height) in [(1, 1), (3, 40), (57, 17), (56, 16), (300, 3), (500, 200)] {
            screen(&state(), width, height);
            screen(&empty, width, height);
        }
    }

    #[test]
    fn a_log_scale_keeps_the_labels_in_nats() {
        let mut state = state();
        state.toggle_log();
        let shown = screen(&state, 100, 30);
        assert!(shown.contains("log scale"), "{shown}");
        assert!(shown.contains("5.4") || shown.contains("5.1"), "the highest loss is 5:\n{shown}");
    }

    #[test]
    fn stopping_is_said() {
        let mut state = state();
        state.stop();
        assert!(screen(&state, 80, 24).contains("stopping and saving after this step"));
    }
}
