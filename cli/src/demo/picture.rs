//! Draws each GPU for the terminal: which parts are held, and by whom.

use super::lines::{KEPT, cut, wrapped};
use std::fmt::Write;

/// Width of a GPU's bar in characters; a multiple of 4, 8 and 12 slices.
const WIDTH: usize = 48;

/// Width of a board's name in characters.
const BOARD: usize = 18;

/// A GPU to be drawn.
#[derive(Debug, Clone)]
pub(crate) struct GpuPicture {
    pub(crate) name: String,
    pub(crate) board: String,
    /// The held parts, in the order of their position.
    pub(crate) parts: Vec<Part>,
}

/// A held part of a GPU.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// The beginning of the part; it and `share`, its size, are fractions of the GPU.
    pub(crate) start: f64,
    pub(crate) share: f64,
    /// The text in the part.
    pub(crate) label: String,
    /// The holder.
    pub(crate) holder: String,
}

/// Draws a node: a bar for each GPU with a letter for each held part and dots for free room, and below it the
/// holder of each part.
pub(crate) fn draw(node: &str, gpus: &[GpuPicture], colour: bool) -> String {
    let mut out = String::new();
    let mut idle: Vec<&str> = Vec::new();
    let _ = writeln!(out, "{node}");
    for gpu in gpus {
        if gpu.parts.is_empty() {
            idle.push(&gpu.name);
            continue;
        }
        let holders: Vec<String> = gpu
            .parts
            .iter()
            .zip('a'..)
            .map(|(part, letter)| {
                format!("{letter} {} {}", part.holder, part.label).replace(' ', &KEPT.to_string())
            })
            .collect();
        let board = cut(gpu.board.trim_start_matches("NVIDIA "), BOARD);
        let _ = writeln!(out, "  {:<6} {board:<BOARD$} |{}|", gpu.name, bar(&gpu.parts, colour));
        out.push_str(&wrapped(&holders.join(", "), 9));
    }
    match idle.as_slice() {
        [] => {}
        [first] => {
            let _ = writeln!(out, "  {first} is free");
        }
        [first, .., last] => {
            let _ = writeln!(out, "  {} GPUs are free: {first} … {last}", idle.len());
        }
    }
    out
}

fn bar(parts: &[Part], colour: bool) -> String {
    let mut out = String::new();
    let mut at = 0usize;
    for (index, part) in parts.iter().enumerate() {
        let cells = |fraction: f64| (fraction * WIDTH as f64).round().clamp(0.0, WIDTH as f64) as usize;
        let start = cells(part.start).max(at);
        let end = cells(part.start + part.share).max(start + 1).min(WIDTH);
        if start >= end {
            continue;
        }
        out.push_str(&"·".repeat(start - at));
        let letter = char::from(b'a'.saturating_add(u8::try_from(index % 26).unwrap_or(0)));
        let whole = format!("{letter} {}", part.label);
        let fits = whole.chars().count() + 2 <= end - start;
        let text = centred(&if fits { whole } else { letter.to_string() }, end - start);
        if colour {
            let shade = [44, 42, 45, 46, 43, 41].get(index % 6).copied().unwrap_or(47);
            let _ = write!(out, "\x1b[{shade};30m{text}\x1b[0m");
        } else {
            out.push_str(&text);
        }
        at = end;
    }
    out.push_str(&"·".repeat(WIDTH - at));
    out
}

/// Centres a label in brackets; without brackets if there is no room.
fn centred(label: &str, width: usize) -> String {
    if width < 3 {
        return label.chars().chain(std::iter::repeat('|')).take(width).collect();
    }
    let inner = width - 2;
    let text: String = label.chars().take(inner).collect();
    let room = inner - text.chars().count();
    let left = room / 2;
    format!("[{}{text}{}]", " ".repeat(left), " ".repeat(room - left))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(start: f64, share: f64, label: &str) -> Part {
        Part { start, share, label: label.into(), holder: format!("pod/{label}") }
    }

    #[test]
    fn parts_stand_where_they_lie_and_free_room_is_dotted() {
        let gpus = [
            GpuPicture {
                name: "gpu-0".into(),
                board: "H100".into(),
                parts: vec![part(0.5, 0.25, "2g.20gb")],
            },
            GpuPicture { name: "gpu-1".into(), board: "H100".into(), parts: Vec::new() },
        ];
        insta::assert_snapshot!(draw("node-a", &gpus, false));
    }

    #[test]
    fn a_picture_fits_80_columns() {
        let board = "NVIDIA RTX PRO 6000 Blackwell Server Edition".to_owned();
        let parts = (0..8).map(|i| part(f64::from(i) / 8.0, 0.125, "1g.10gb")).collect();
        let gpu = GpuPicture { name: "gpu-11".into(), board, parts };
        let drawn = draw("node-a", &[gpu], false);
        assert!(drawn.lines().all(|line| line.chars().count() <= 80), "{drawn}");
    }

    #[test]
    fn the_bar_is_always_as_wide_as_the_gpu() {
        let crowded: Vec<Part> = (0..100).map(|i| part(f64::from(i) / 100.0, 0.01, "x")).collect();
        for parts in [vec![], vec![part(0.0, 1.0, "whole")], vec![part(0.99, 0.5, "long label")], crowded] {
            assert_eq!(bar(&parts, false).chars().count(), WIDTH, "{parts:?}");
        }
    }
}
