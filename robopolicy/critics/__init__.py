"""critics"""
