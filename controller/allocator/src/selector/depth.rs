//! Limits the levels of a tree while it is parsed.

use super::tree::children;
use cel::common::ast::{Expr, IdedExpr};

/// The most levels of a tree. cel-go's parser accepts 250 levels of each kind.
const MOST_LEVELS: u64 = 300;

/// Creates a node above its parts.
///
/// # Errors
/// A message if the tree has too many levels.
pub(super) fn node(expr: Expr) -> Result<IdedExpr, String> {
    let mut node = IdedExpr { id: 0, expr };
    let below = children(&node).into_iter().map(|child| child.id).max();
    node.id = below.map_or(0, |below| below + 1);
    if node.id > MOST_LEVELS {
        return Err(format!(
            "it is nested deeper than {MOST_LEVELS} levels; split it into several selectors"
        ));
    }
    Ok(node)
}
