"""What products on Blackwell share around tcgen05 and tensor memory."""
