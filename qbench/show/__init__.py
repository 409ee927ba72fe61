"""What results hold, as text for a terminal: a folder, a cell, a document. No torch."""

from qbench.show.cell import cell_text
from qbench.show.document import document_text
from qbench.show.folder import folder_text

__all__ = ["cell_text", "document_text", "folder_text"]
