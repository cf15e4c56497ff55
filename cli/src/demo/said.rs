//! The output of a container's program, as far as it is shown.

use std::time::Instant;

/// The number of lines that are kept of a program.
const LINES: usize = 4;
/// The number of bytes that are kept of a line.
const BYTES: usize = 400;

/// Returns a text without characters that a terminal would obey, or that change the order of the text.
pub(crate) fn printable(text: &str) -> String {
    let obeyed = |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    text.chars().map(|c| if obeyed(c) && c != '\n' { ' ' } else { c }).collect()
}

/// The first lines of a program's output, and the time of its last output.
#[derive(Debug, Clone, Default)]
pub(crate) struct Heard {
    pub(crate) lines: Vec<String>,
    pub(crate) last: Option<Instant>,
}

impl Heard {
    /// Adds lines as far as there is room, and notes the time.
    pub(crate) fn add(&mut self, lines: Vec<String>) {
        self.last = Some(Instant::now());
        let room = LINES.saturating_sub(self.lines.len());
        self.lines.extend(lines.into_iter().take(room));
    }
}

/// Splits output that comes in pieces into lines. Empty lines are skipped, long lines are cut, and characters
/// that a terminal would obey are removed. Text that a carriage return replaces, as progress bars do, is left
/// out.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    line: Vec<u8>,
    /// True if the next character replaces the line.
    returned: bool,
}

impl Lines {
    /// Returns the lines that end in a piece.
    pub(crate) fn take(&mut self, piece: &[u8]) -> Vec<String> {
        let mut lines = Vec::new();
        for byte in piece {
            let returned = std::mem::replace(&mut self.returned, *byte == b'\r');
            if returned && !matches!(byte, b'\r' | b'\n') {
                self.line.clear();
            }
            match byte {
                b'\n' => lines.extend(self.rest()),
                b'\r' => {}
                _ if self.line.len() < BYTES => self.line.push(*byte),
                _ => {}
            }
        }
        lines
    }

    /// Returns the line that has not ended yet, if it is not empty.
    pub(crate) fn rest(&mut self) -> Vec<String> {
        let line = std::mem::take(&mut self.line);
        let text = String::from_utf8_lossy(&line);
        let text = printable(&text);
        let text = text.trim_end();
        if text.is_empty() { Vec::new() } else { vec![text.to_owned()] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(pieces: &[&[u8]]) -> Vec<String> {
        let mut lines = Lines::default();
        let mut all: Vec<String> = pieces.iter().flat_map(|piece| lines.take(piece)).collect();
        all.extend(lines.rest());
        all
    }

    #[test]
    fn lines_come_whole_whatever_the_pieces_are() {
        assert_eq!(lines(&[b"one\ntw", b"o\n\nthr", b"ee"]), ["one", "two", "three"]);
        assert_eq!(lines(&[b"", b"\n \n"]), Vec::<String>::new());
    }

    #[test]
    fn a_terminal_obeys_nothing_of_it_and_a_progress_bar_is_its_last_state() {
        assert_eq!(lines(&[b"\x1b]0;title\x07red\n"]), [" ]0;title red"]);
        assert_eq!(lines(&[b" 10 %\r 20 %\r100 %\n"]), ["100 %"]);
        assert_eq!(lines(&[b"of Windows\r", b"\n"]), ["of Windows"]);
        assert_eq!(printable("a\u{202e}b\nc\u{1b}"), "a b\nc ");
    }

    #[test]
    fn what_has_no_end_takes_no_memory() {
        let mut one = Lines::default();
        for _ in 0..1000 {
            assert!(one.take(&[b'x'; 4096]).is_empty());
        }
        assert!(one.line.capacity() <= 2 * BYTES);
        assert_eq!(one.rest(), ["x".repeat(BYTES)]);
        let mut heard = Heard::default();
        (0..10).for_each(|number| heard.add(vec![number.to_string()]));
        assert_eq!(heard.lines, ["0", "1", "2", "3"]);
    }
}
